"""What this process knows of a session beyond the catalog: who writes it now, and what the worker holds of it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from kvrecall.v1 import worker_pb2 as wire
from services.catalog import Catalog
from services.errors import Overloaded, SessionBusy, UnknownSession, WorkerRefused
from services.reports import MemoryReport, memory_from_wire
from services.sessions import Session, SessionEvent, SessionState, next_state
from services.settings import ServiceSettings
from services.worker_client import Worker

Answer = TypeVar("Answer")


class LiveSession:
    """One session in this process.

    `in_doubt` says that the worker may hold something else than what was committed; it is so until the session is
    first opened here, while a turn or repair runs, and after one that failed. `hurry` is set: a turn has come that
    takes what repairs have found so far, and none may begin. `repairs_wanted`: some may be due.
    """

    def __init__(self, session: Session) -> None:
        self.id = session.id
        self.state = session.resting_state
        self.epoch: int | None = None
        self.in_doubt = True
        self.opened = False
        self.deleted = False
        self.writing = asyncio.Lock()
        self.opening = asyncio.Lock()
        self.turns_in_line = 0
        self.waiting = 0
        self.has_episodes = session.settings.episodes is not None
        self.rest: asyncio.Task[None] | None = None
        self.keeping: asyncio.Task[None] | None = None
        self.repairs_wanted = False
        self.hurry = asyncio.Event()

    def advance(self, event: SessionEvent) -> None:
        """Move to the next state. Raises IllegalTransition."""
        self.state = next_state(self.state, event)

    def roll_back(self, session: Session) -> None:
        """Return to the state that was committed."""
        paused = session.resting_state is SessionState.PAUSED
        self.advance(SessionEvent.ROLLED_BACK_TO_PAUSE if paused else SessionEvent.ROLLED_BACK_TO_IDLE)


class LiveSessions:
    """The sessions that this process has touched, and their way into the worker."""

    def __init__(self, catalog: Catalog, worker: Worker, settings: ServiceSettings) -> None:
        self._catalog = catalog
        self._worker = worker
        self._settings = settings
        self._live: dict[str, LiveSession] = {}

    def all(self) -> list[LiveSession]:
        """Every session touched so far."""
        return list(self._live.values())

    def known(self, session: str) -> LiveSession | None:
        """The session if it was touched already."""
        return self._live.get(session)

    def of(self, session: Session) -> LiveSession:
        """The session, touched now if it was not."""
        return self._live.setdefault(session.id, LiveSession(session))

    def created(self, session: Session) -> None:
        """Note a session that was just opened in the worker and committed."""
        live = self.of(session)
        live.epoch, live.in_doubt, live.opened = session.epoch, False, True

    def forget(self, live: LiveSession) -> None:
        """The session was deleted; whoever still waits for it is told so."""
        live.deleted = True
        self._live.pop(live.id, None)

    @asynccontextmanager
    async def claim_turn(self, live: LiveSession, wait: bool) -> AsyncIterator[None]:
        """Be the one writer for a turn. Raises SessionBusy while another turn runs, unless `wait` (bounded)."""
        if live.turns_in_line and not wait:
            raise SessionBusy(
                f"session {live.id!r} is in the middle of a turn; wait for its end or send queue: true", session=live.id
            )
        live.turns_in_line += 1
        try:
            async with self.claim(live):
                yield
        finally:
            live.turns_in_line -= 1

    @asynccontextmanager
    async def claim(self, live: LiveSession) -> AsyncIterator[None]:
        """Be the one writer, after those who came before. Raises SessionBusy, Overloaded, UnknownSession."""
        await self._acquire(live)
        try:
            if live.deleted:
                raise UnknownSession(live.id)
            yield
        finally:
            live.writing.release()

    async def _acquire(self, live: LiveSession) -> None:
        settings = self._settings
        if live.writing.locked() and live.waiting >= settings.max_waiting_writers:
            message = f"{live.waiting} requests wait for session {live.id!r} already; try again later"
            raise Overloaded(message, settings.retry_after_seconds)
        live.waiting += 1
        try:
            async with asyncio.timeout(settings.queue_seconds):
                await live.writing.acquire()
        except TimeoutError as error:
            message = f"session {live.id!r} was busy for {settings.queue_seconds:g} seconds; try again later"
            raise SessionBusy(message, session=live.id) from error
        finally:
            live.waiting -= 1

    async def epoch(self, live: LiveSession) -> int:
        """The epoch under which this process writes the session, taken over at the first call."""
        async with live.opening:
            return await self._epoch(live)

    async def _epoch(self, live: LiveSession) -> int:
        if live.epoch is None:
            live.epoch = await self._catalog.take_over(live.id)
        return live.epoch

    async def ensure_open(self, live: LiveSession) -> int:
        """Make the worker hold exactly what was committed: the one way of resume and of rollback. Gives the epoch."""
        async with live.opening:
            epoch = await self._epoch(live)
            if live.in_doubt:
                session = await self._catalog.session(live.id)
                state = wire.SessionState.FromString(await self._catalog.worker_state(live.id))
                await self._worker.open(wire.OpenRequest(spec=spec_of(session, epoch), state=state))
                live.in_doubt, live.opened = False, True
            return epoch

    async def call_in(self, live: LiveSession, call: Callable[[], Awaitable[Answer]]) -> Answer:
        """Make a call in an open session; a worker that was restarted meanwhile is told of the session first."""
        try:
            return await call()
        except WorkerRefused as refusal:
            await self.reopen(live, refusal)
        return await call()

    async def reopen(self, live: LiveSession, refusal: WorkerRefused) -> None:
        """Open the session again in a worker that does not know it. Raises the refusal if it was for another reason."""
        if refusal.code != "unknown_session":
            raise refusal
        doubt, live.in_doubt = live.in_doubt, True
        await self.ensure_open(live)
        live.in_doubt = doubt

    async def memory(self, session: Session) -> MemoryReport:
        """What the worker holds now, or what was committed last if the worker does not hold the session."""
        live = self.known(session.id)
        if live is None or not live.opened:
            return session.memory
        try:
            return memory_from_wire(await self._worker.memory(session.id))
        except WorkerRefused:
            return session.memory


def spec_of(session: Session, epoch: int) -> wire.SessionSpec:
    """What the worker must know of a session's settings."""
    settings = session.settings
    return wire.SessionSpec(
        session=session.id,
        epoch=epoch,
        budget=settings.budget,
        repair_rows=settings.repair_rows,
        method=settings.method,
        method_settings=settings.method_settings,
        seed=settings.seed,
        tools=settings.tools,
        layer_budgets=settings.layer_budgets or "",
        repair_settings=settings.repair_settings,
        repair_scan=settings.repair_scan or "",
        shared=[wire.SharedPages(owner=each.owner, pages=each.pages) for each in session.shared],
    )
