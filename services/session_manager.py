"""What this process knows of a session beyond the catalog: who writes it now, and what the worker holds of it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

from kvrecall.domain.codes import ErrorCode
from kvrecall.domain.errors import (
    Overloaded,
    ServiceError,
    SessionBusy,
    StaleEpoch,
    UnknownSession,
    WorkerLost,
    WorkerRefused,
)
from kvrecall.domain.events import EventBus, PagesRebuilt
from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.reports import MemoryReport
from kvrecall.domain.session import Session
from kvrecall.domain.state_machine import SessionEvent, SessionState, next_state
from kvrecall.protocol.convert import memory_from_wire, session_spec_to_wire
from kvrecall.protocol.v1 import worker_pb2 as wire
from services.catalog.base import Catalog
from services.catalog.records import REPAIRS_RETAINED
from services.cluster.worker_client import Worker
from services.leases import Claim, Leases
from services.turn_log import logged_turns

Answer = TypeVar("Answer")

_CLAIMS_WAITED = 1.5
"""Claims that a turn waits for another process: one that nobody renews has ended by then."""
MOST_ATTEMPTS = 3
"""Workers that one request is tried in."""
GONE = frozenset({ErrorCode.WORKER_LOST, ErrorCode.CANCELLED, ErrorCode.STORAGE_FAILED})
"""Codes of errors that another worker may not have: this one died, it drains, it cannot write."""
_HELPED_BY_OPENING = frozenset(
    {ErrorCode.SESSION_NOT_OPEN, ErrorCode.STALE_EPOCH, ErrorCode.ROWS_MISSING}
)
_TURNS_AT_ONCE = 128


class ActiveSession:
    """One session in this process.

    It is `in_doubt` until it is first opened here, while a turn or repair runs, after one that failed, and when
    another process has written it since. `hurry` is set: a turn has come that takes what repairs have found so far,
    and none may begin. `repairs_wanted`: some may be due.
    """

    def __init__(self, session: Session) -> None:
        self.id = session.id
        self.state = session.committed_state
        self.claim = Claim(session.id)
        self._in_doubt = True
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

    @property
    def in_doubt(self) -> bool:
        """Whether the worker may hold something else than what was committed."""
        return self._in_doubt or self.claim.epoch is None

    @in_doubt.setter
    def in_doubt(self, doubt: bool) -> None:
        self._in_doubt = doubt

    @property
    def at_rest(self) -> bool:
        """Whether this process does nothing in the session that changes its state; another one may."""
        return self.state in (SessionState.IDLE, SessionState.PAUSED)

    @property
    def in_turn(self) -> bool:
        """Whether a turn runs that is not committed."""
        return self.state in (SessionState.PREFILLING, SessionState.DECODING)

    def advance(self, event: SessionEvent) -> None:
        """Move to the next state. Raises IllegalTransition."""
        self.state = next_state(self.state, event)

    def roll_back(self, session: Session) -> None:
        """Return to the state that was committed."""
        paused = session.committed_state is SessionState.PAUSED
        self.advance(
            SessionEvent.ROLLED_BACK_TO_PAUSE if paused else SessionEvent.ROLLED_BACK_TO_IDLE
        )


class SessionManager:
    """The sessions that this process has touched, and their way into the worker."""

    def __init__(
        self, catalog: Catalog, worker: Worker, observers: EventBus, settings: ServiceLimits
    ) -> None:
        self._catalog = catalog
        self._worker = worker
        self._observers = observers
        self._settings = settings
        self._leases = Leases(catalog, settings)
        self._live: dict[str, ActiveSession] = {}

    def all(self) -> list[ActiveSession]:
        """Every session touched so far."""
        return list(self._live.values())

    def known(self, session: str) -> ActiveSession | None:
        """The session if it was touched already."""
        return self._live.get(session)

    def of(self, session: Session) -> ActiveSession:
        """The session, touched now if it was not."""
        return self._live.setdefault(session.id, ActiveSession(session))

    def created(self, session: Session) -> None:
        """Note a session that was just opened in the worker and committed."""
        live = self.of(session)
        live.claim.epoch = session.epoch
        live.claim.worker = session.worker
        live.in_doubt = False
        live.opened = True

    def forget(self, live: ActiveSession) -> None:
        """The session was deleted; whoever still waits for it is told so."""
        live.deleted = True
        self._live.pop(live.id, None)

    @asynccontextmanager
    async def claim_turn(self, live: ActiveSession, wait: bool) -> AsyncIterator[None]:
        """Be the one writer for a turn. Raises SessionBusy while another turn runs, unless `wait` (bounded).

        What another process does is waited for as long as a claim lasts that nobody renews: it may be gone.
        """
        if live.turns_in_line and not wait:
            raise SessionBusy(
                f"session {live.id!r} is in the middle of a turn; wait for its end or send queue: true",
                session=live.id,
            )
        live.turns_in_line += 1
        try:
            async with self.claim(
                live, None if wait else _CLAIMS_WAITED * self._settings.claim_seconds
            ):
                yield
        finally:
            live.turns_in_line -= 1

    @asynccontextmanager
    async def claim(
        self, live: ActiveSession, patience: float | None = None
    ) -> AsyncIterator[None]:
        """Be the one writer, after those who came before, in this process and (for `patience` seconds) in others.

        Raises SessionBusy, Overloaded, UnknownSession, and StaleEpoch when another process took the session over in
        the middle.
        """
        longest = self._settings.queue_seconds
        await self._acquire(live)
        try:
            if live.deleted:
                raise UnknownSession(live.id)
            async with self._leases.held(
                live.claim, longest if patience is None else min(patience, longest)
            ):
                yield
        finally:
            live.writing.release()

    async def _acquire(self, live: ActiveSession) -> None:
        settings = self._settings
        if live.writing.locked() and live.waiting >= settings.max_waiting_writers:
            message = (
                f"{live.waiting} requests wait for session {live.id!r} already; try again later"
            )
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

    async def epoch(self, live: ActiveSession) -> int:
        """The epoch under which this process writes the session, taken over if it is not its own."""
        async with live.opening:
            if live.claim.epoch is not None:
                return live.claim.epoch
            async with self._leases.held(live.claim):
                return await self._leases.take_over(live.claim, live.claim.worker)

    async def ensure_open(self, live: ActiveSession, avoid: Sequence[str] = ()) -> int:
        """Make the worker hold exactly what was committed: the one way of resume and of rollback. Gives the epoch.

        In the worker that has the session, unless that is not well or to be avoided. Lost pages are computed again.
        """
        async with live.opening:
            if not live.in_doubt and live.claim.epoch is not None:
                return live.claim.epoch
            async with self._leases.held(live.claim):
                return await self._open(live, self._worker.place(live.id, live.claim.worker, avoid))

    def may_go_elsewhere(self, session: str, lost: Sequence[str], error: ServiceError) -> bool:
        """Whether what failed with `error` may be tried in another worker than those that it was `lost` in."""
        if len(lost) >= MOST_ATTEMPTS or error.code not in GONE:
            return False
        try:
            self._worker.place(session, "", lost)
        except WorkerLost:
            return False
        return True

    async def call_in(
        self, live: ActiveSession, epoch: int, call: Callable[[int], Awaitable[Answer]]
    ) -> Answer:
        """Make a call under an epoch of an open session; where reopening helps it is made again, under a fresh one."""
        try:
            return await call(epoch)
        except WorkerRefused as refusal:
            fresh = await self.reopen(live, epoch, refusal)
        return await call(fresh)

    async def reopen(self, live: ActiveSession, epoch: int, refusal: WorkerRefused) -> int:
        """Open the session again in a worker that was restarted, or has lost pages. Gives the fresh epoch.

        Raises the refusal if it was for another reason, StaleEpoch if another process went on with the session.
        """
        if refusal.code not in _HELPED_BY_OPENING:
            raise refusal
        async with live.opening, self._leases.held(live.claim):
            if live.claim.epoch != epoch:
                message = f"another process took session {live.id!r} over; send the request again"
                raise StaleEpoch(message) from refusal
            doubt = live.in_doubt
            place = self._worker.place(live.id, live.claim.worker)
            fresh = await self._open(live, place, lost_pages=refusal.code is ErrorCode.ROWS_MISSING)
            live.in_doubt = doubt
            return fresh

    async def rebuild(self, live: ActiveSession) -> None:
        """Compute the session's lost pages again, and open it as it was committed."""
        async with live.opening, self._leases.held(live.claim):
            await self._open(live, self._worker.place(live.id, live.claim.worker), lost_pages=True)

    async def move(self, live: ActiveSession, worker: str) -> None:
        """Open the session, as it was committed, in another worker, and free what the others hold of it."""
        async with live.opening, self._leases.held(live.claim):
            left = live.claim.worker
            try:
                epoch = await self._open(live, worker)
            except ServiceError:
                with suppress(ServiceError):
                    await self._leases.take_over(live.claim, left)
                raise
        await self._worker.release(wire.ReleaseRequest(session=live.id, epoch=epoch))

    async def _open(self, live: ActiveSession, worker: str, lost_pages: bool = False) -> int:
        """Under a fresh epoch, so that a call of before that is still on its way is refused."""
        live.in_doubt = True
        epoch = await self._leases.take_over(live.claim, worker)
        live.claim.unused = False
        session = await self._catalog.sessions.get(live.id)
        spec = session_spec_to_wire(session, epoch)
        state = wire.SessionState.FromString(await self._catalog.sessions.get_worker_state(live.id))
        try:
            if not lost_pages:
                await self._worker.open(wire.OpenRequest(spec=spec, state=state))
        except WorkerRefused as refusal:
            if refusal.code is not ErrorCode.ROWS_MISSING:
                raise
            lost_pages = True
        if lost_pages:
            await self._rebuild(session, worker, wire.RebuildRequest(spec=spec, state=state))
        live.in_doubt = False
        live.opened = True
        return epoch

    async def _rebuild(self, session: Session, worker: str, request: wire.RebuildRequest) -> None:
        after = 0
        repairs = await self._catalog.repairs.get_latest(session.id, REPAIRS_RETAINED)
        while turns := await self._catalog.turns.get_after(session.id, after, _TURNS_AT_ONCE):
            request.turns.extend(logged_turns(turns, repairs))
            after = turns[-1].number
        result = await self._worker.rebuild(request)
        self._observers.publish(PagesRebuilt(session.id, worker, result.pages, result.seconds))

    async def memory(self, session: Session) -> MemoryReport:
        """What the worker holds now, or what was committed last if the worker does not hold the session."""
        live = self.known(session.id)
        if live is None or not live.opened:
            return session.memory
        try:
            return memory_from_wire(await self._worker.memory(session.id))
        except (WorkerRefused, WorkerLost):
            return session.memory
