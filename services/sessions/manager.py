"""The sessions that this process is active in.

Exclusive access to them, and their way into a worker.
"""

import asyncio
from collections import OrderedDict
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
from kvrecall.domain.events import (
    ClaimLost,
    EventBus,
    OpenReason,
    PagesRebuilt,
    SessionForgotten,
    SessionOpened,
    WriterFenced,
)
from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.reports import MemoryReport
from kvrecall.domain.sessions.session import Session
from kvrecall.protocol.convert import memory_from_wire
from kvrecall.protocol.v1 import worker_pb2 as pb
from kvrecall.telemetry.spans import span
from services.catalog.base import Catalog
from services.catalog.records import REPAIRS_RETAINED
from services.cluster.worker_client import Worker
from services.sessions.active import ActiveSession
from services.sessions.leases import Leases
from services.sessions.specs import build_spec
from services.sessions.turn_log import logged_turns
from services.sessions.worker_states import read_state

Answer = TypeVar("Answer")

# Lease durations that a turn waits for another process: a lease that is not renewed has expired by
# then.
_LEASES_WAITED = 1.5
# Workers that one request is tried in.
MAX_ATTEMPTS = 3
# Another worker may do better after these: this one died, drains, or cannot write.
_WORTH_ANOTHER_WORKER = frozenset(
    {ErrorCode.WORKER_LOST, ErrorCode.CANCELLED, ErrorCode.STORAGE_FAILED}
)
_FIXED_BY_REOPENING = frozenset(
    {ErrorCode.SESSION_NOT_OPEN, ErrorCode.STALE_EPOCH, ErrorCode.ROWS_MISSING}
)
# The worker may have stopped anywhere, also where it did not notice that the session had changed.
_UNCLEAR = frozenset({ErrorCode.WORKER_ERROR})
_TURNS_PER_READ = 128


def may_have_changed(refusal: WorkerRefused) -> bool:
    """Return whether a session must be opened again after its worker refused a request.

    It need not be when the request itself was at fault, or the worker is busy: if the worker had
    changed the session by then, it has closed it, and refuses the next request because of that.
    """
    return refusal.code in _WORTH_ANOTHER_WORKER | _FIXED_BY_REOPENING | _UNCLEAR


class SessionManager:
    """Tracks active sessions, grants exclusive access to them and opens them in a worker."""

    def __init__(
        self, catalog: Catalog, worker: Worker, events: EventBus, limits: ServiceLimits
    ) -> None:
        self._catalog = catalog
        self._worker = worker
        self._events = events
        self._limits = limits
        self._leases = Leases(catalog, limits, lambda lost: events.publish(ClaimLost(lost)))
        self._active: OrderedDict[str, ActiveSession] = OrderedDict()

    def all(self) -> list[ActiveSession]:
        """Return every active session."""
        return list(self._active.values())

    def find(self, session: str) -> ActiveSession | None:
        """Return the session if it is active."""
        return self._active.get(session)

    def activate(self, session: Session) -> ActiveSession:
        """Return the session, made active if it was not.

        The caller claims it before it waits for anything else. The longest unused sessions beyond
        `idle_sessions` are forgotten; their next use opens them again under a new epoch.
        """
        live = self._active.setdefault(session.id, ActiveSession(session, self._events))
        self._active.move_to_end(session.id)
        self._forget_unused()
        return live

    def _forget_unused(self) -> None:
        """Forget the longest unused sessions, but not the one that was used last."""
        for _ in range(len(self._active) - 1):
            if len(self._active) <= self._limits.idle_sessions:
                return
            _, live = self._active.popitem(last=False)
            if live.in_use:
                self._active[live.id] = live
            else:
                self._worker.forget(live.id)
                self._events.publish(SessionForgotten(live.id))

    def add_created(self, session: Session) -> None:
        """Add a session that was just opened in the worker and committed."""
        live = self.activate(session)
        live.claim.epoch = session.epoch
        live.claim.worker = session.worker
        live.needs_reopen = False
        live.opened = True

    def remove(self, live: ActiveSession) -> None:
        """Remove a deleted session; requests that still wait for it fail with UnknownSession."""
        live.deleted = True
        self._active.pop(live.id, None)

    @asynccontextmanager
    async def claim_turn(self, live: ActiveSession, wait: bool) -> AsyncIterator[None]:
        """Hold the session for a turn. Raises SessionBusy while another turn runs, unless `wait`.

        Another process is waited for until its lease would have expired: it may have died.
        """
        if live.queued_turns and not wait:
            raise SessionBusy(
                f"session {live.id!r} is in the middle of a turn; wait for its end or send queue: true",
                session=live.id,
            )
        live.queued_turns += 1
        try:
            async with self.claim(
                live, None if wait else _LEASES_WAITED * self._limits.claim_seconds
            ):
                yield
        finally:
            live.queued_turns -= 1

    @asynccontextmanager
    async def claim(
        self, live: ActiveSession, patience: float | None = None
    ) -> AsyncIterator[None]:
        """Hold the session exclusively, first come, first served.

        Other processes are waited for `patience` seconds. Raises SessionBusy, Overloaded,
        UnknownSession, and StaleEpoch when another process took the session over meanwhile.
        """
        longest = self._limits.queue_seconds
        await self._acquire(live)
        try:
            if live.deleted:
                raise UnknownSession(live.id)
            async with self._leases.held(
                live.claim, longest if patience is None else min(patience, longest)
            ):
                yield
        finally:
            live.write_lock.release()

    async def _acquire(self, live: ActiveSession) -> None:
        limits = self._limits
        if live.write_lock.locked() and live.waiting_writers >= limits.max_waiting_writers:
            message = f"{live.waiting_writers} requests wait for session {live.id!r} already; try again later"
            raise Overloaded(message, limits.retry_after_seconds)
        live.waiting_writers += 1
        try:
            async with asyncio.timeout(limits.queue_seconds):
                await live.write_lock.acquire()
        except TimeoutError as error:
            message = f"session {live.id!r} was busy for {limits.queue_seconds:g} seconds; try again later"
            raise SessionBusy(message, session=live.id) from error
        finally:
            live.waiting_writers -= 1

    async def epoch(self, live: ActiveSession) -> int:
        """Return the epoch under which this process writes the session, after a takeover if it has none."""
        async with live.open_lock:
            if live.claim.epoch is not None:
                return live.claim.epoch
            # No worker has seen the new epoch, and another process may have moved the session: the worker
            # in which it was opened here may be gone, while the one that holds it now is not.
            live.needs_reopen = True
            async with self._leases.held(live.claim):
                return await self._leases.take_over(live.claim, live.claim.worker)

    async def ensure_open(
        self,
        live: ActiveSession,
        avoid: Sequence[str] = (),
        session: Session | None = None,
        family: str = "",
    ) -> int:
        """Make a worker hold exactly what was committed, and return the epoch.

        This one call is resume, rollback, recovery and takeover. The worker that has the session is
        preferred, unless it is unhealthy or in `avoid`. Missing pages are rebuilt. `session`: as
        committed now, for a caller that has read it since no other process can write it. `family`: the
        prompt family of a session without rows, which goes to the worker of this family.
        """
        async with live.open_lock:
            epoch = None if live.needs_reopen else live.claim.epoch
            if epoch is not None and not family:
                return epoch
            async with self._leases.held(live.claim):
                owner = "" if family else live.claim.worker
                worker = self._worker.choose_worker(live.id, owner, avoid, family)
                if epoch is not None and worker == live.claim.worker:
                    return epoch
                placed = family and not avoid and worker != live.claim.worker
                return await self._open(
                    live, worker, session, reason="first_use" if placed else None
                )

    def can_retry_elsewhere(self, session: str, lost: Sequence[str], error: ServiceError) -> bool:
        """Return whether a request that failed with `error` may be tried in a worker outside `lost`."""
        if len(lost) >= MAX_ATTEMPTS or error.code not in _WORTH_ANOTHER_WORKER:
            return False
        try:
            self._worker.choose_worker(session, "", lost)
        except WorkerLost:
            return False
        return True

    async def call_reopening(
        self, live: ActiveSession, epoch: int, call: Callable[[int], Awaitable[Answer]]
    ) -> Answer:
        """Make a call under the epoch of an open session.

        Reopen and retry once where that can help.
        """
        try:
            return await call(epoch)
        except WorkerRefused as refusal:
            fresh = await self.reopen(live, epoch, refusal)
        return await call(fresh)

    async def reopen(self, live: ActiveSession, epoch: int, refusal: WorkerRefused) -> int:
        """Open the session again in a worker that was restarted or misses pages.

        Return the fresh epoch. Raises the refusal when it has another reason, StaleEpoch when another process took the
        session over.
        """
        if refusal.code not in _FIXED_BY_REOPENING:
            raise refusal
        if refusal.code is ErrorCode.STALE_EPOCH:
            self._events.publish(WriterFenced("worker"))
        async with live.open_lock, self._leases.held(live.claim):
            if live.claim.epoch != epoch:
                message = f"another process took session {live.id!r} over; send the request again"
                raise StaleEpoch(message) from refusal
            dirty = live.needs_reopen
            worker = self._worker.choose_worker(live.id, live.claim.worker)
            fresh = await self._open(
                live, worker, pages_missing=refusal.code is ErrorCode.ROWS_MISSING
            )
            live.needs_reopen = dirty
            return fresh

    async def rebuild(self, live: ActiveSession) -> None:
        """Rebuild the session's missing pages and open it as it was committed."""
        async with live.open_lock, self._leases.held(live.claim):
            await self._open(
                live, self._worker.choose_worker(live.id, live.claim.worker), pages_missing=True
            )

    async def move(self, live: ActiveSession, worker: str) -> None:
        """Open the session, as it was committed, in another worker, and release it in the others."""
        async with live.open_lock, self._leases.held(live.claim):
            left = live.claim.worker
            try:
                epoch = await self._open(live, worker, reason="move")
            except ServiceError:
                with suppress(ServiceError):
                    await self._leases.take_over(live.claim, left)
                raise
        await self._worker.release(pb.ReleaseRequest(session=live.id, epoch=epoch))

    async def _open(
        self,
        live: ActiveSession,
        worker: str,
        session: Session | None = None,
        pages_missing: bool = False,
        reason: OpenReason | None = None,
    ) -> int:
        """Open under a fresh epoch, so that an earlier call that is still on its way is refused."""
        opened = SessionOpened(live.id, worker, reason or live.get_open_reason(worker))
        live.needs_reopen = True
        epoch = await self._leases.take_over(live.claim, worker)
        live.claim.unused = False
        if session is None:
            session = await self._catalog.sessions.get(live.id)
        spec = await build_spec(self._catalog, self._limits, session, epoch)
        state = await read_state(self._catalog, live.id)
        try:
            if not pages_missing:
                await self._worker.open(pb.OpenRequest(spec=spec, state=state))
        except WorkerRefused as refusal:
            if refusal.code is not ErrorCode.ROWS_MISSING:
                raise
            pages_missing = True
        if pages_missing:
            await self._rebuild(session, worker, pb.RebuildRequest(spec=spec, state=state))
        live.needs_reopen = False
        live.opened = True
        self._events.publish(opened)
        return epoch

    async def _rebuild(self, session: Session, worker: str, request: pb.RebuildRequest) -> None:
        after = 0
        repairs = await self._catalog.repairs.get_latest(session.id, REPAIRS_RETAINED)
        while turns := await self._catalog.turns.get_after(session.id, after, _TURNS_PER_READ):
            request.turns.extend(logged_turns(turns, repairs))
            after = turns[-1].number
        with span("rebuild pages"):
            result = await self._worker.rebuild(request)
        self._events.publish(PagesRebuilt(session.id, worker, result.pages, result.seconds))

    async def memory(self, session: Session) -> MemoryReport:
        """Report what the worker holds, or what was committed last when the session is not open there."""
        live = self.find(session.id)
        if live is None or not live.opened:
            return session.memory
        try:
            return memory_from_wire(await self._worker.memory(session.id))
        except (WorkerRefused, WorkerLost):
            return session.memory
