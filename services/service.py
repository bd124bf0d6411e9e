"""Everything the front door may ask: sessions, turns, reports of tool calls, memory. Puts the parts together."""

import asyncio
import secrets
import time
from contextlib import suppress
from dataclasses import replace

from pydantic import TypeAdapter

from kvrecall.domain.errors import (
    InvalidRequest,
    ServiceError,
    ShuttingDown,
    WorkerLost,
    WorkerRefused,
    WorkerUnavailable,
)
from kvrecall.domain.events import EventBus, Observer, SessionDeleted, SessionMoved
from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.repairs import due_repairs
from kvrecall.domain.reports import MemoryReport
from kvrecall.domain.session import Session, Turn
from kvrecall.domain.session_request import CreateSession, resolve_settings
from kvrecall.domain.session_settings import SessionSettings
from kvrecall.domain.state_machine import SessionState
from kvrecall.domain.tool_events import EventReceipt, ToolEvent, apply_event, is_late, receipt
from kvrecall.domain.turn_request import TurnRequest
from kvrecall.domain.worker_info import WorkerInfo
from kvrecall.protocol.convert import session_spec_to_wire, worker_info_from_wire
from kvrecall.protocol.v1 import worker_pb2 as wire
from services.admission import Admission
from services.background import BackgroundTasks
from services.cancellation import run_to_completion
from services.catalog.base import Catalog
from services.catalog.records import EpisodeSet, IdempotencyKey, IdempotencyRecord, SessionPage
from services.cluster.worker_client import Worker
from services.episode_maintenance import EpisodeMaintainer
from services.episode_router import EpisodeRouter
from services.forks import ForkRunner, NewFork
from services.page_gc import PageCollector
from services.prefix_sharing import PrefixSharing
from services.quotas import Quotas
from services.repair_history import RepairHistoryEntry, load_repair_history
from services.repair_runner import RepairRunner
from services.session_manager import ActiveSession, SessionManager
from services.tool_call_timeouts import ToolCallTimeouts
from services.turn_stream import TurnStream
from services.turns import TurnRunner

SESSION = TypeAdapter(Session)
RECEIPT = TypeAdapter(EventReceipt)


class SessionService:
    """The domain behind one object. Call `start` before anything else and `stop` at the end.

    It owns the worker and the catalog it is given: `stop` closes both.
    """

    def __init__(self, worker: Worker, catalog: Catalog, settings: ServiceLimits) -> None:
        self._worker = worker
        self._catalog = catalog
        self.settings = settings
        self._observers = EventBus()
        self._sessions = SessionManager(catalog, worker, self._observers, settings)
        self._resting = _resting(catalog, worker, self._sessions, self._observers, settings)
        self._pause_limit = ToolCallTimeouts(catalog, self._sessions, self._observers, settings)
        self._leftovers = PageCollector(catalog, worker)
        self.admission = Admission(settings)
        self._tenants = Quotas(catalog, self._observers, settings)
        matcher = EpisodeRouter(catalog, worker, self._observers, settings)
        prefixes = PrefixSharing(catalog, worker)
        self._turns = TurnRunner(
            catalog,
            worker,
            self._sessions,
            self._resting,
            matcher,
            prefixes,
            self._tenants,
            self.admission,
            self._observers,
            settings,
        )
        self._forks = ForkRunner(
            catalog,
            worker,
            self._sessions,
            self._resting,
            self.admission,
            self._tenants,
            self._observers,
        )
        self._running: set[asyncio.Task[None]] = set()
        self._creating = asyncio.Lock()
        self._info: WorkerInfo | None = None
        self._taking = False

    @property
    def ready(self) -> bool:
        """Whether new work is taken."""
        return self._taking

    @property
    def info(self) -> WorkerInfo:
        """Model, shape and limits of the worker."""
        assert self._info is not None, "the service was not started"
        return self._info

    def observe(self, observer: Observer) -> None:
        """Tell `observer` of every turn and repair from now on."""
        self._observers.add(observer)

    async def start(self) -> None:
        """Learn the worker's limits and drop rows of sessions that are gone; then take work."""
        try:
            await self.worker_joined()
        except WorkerLost:
            if self._info is None:
                raise
            # It was lost a moment after it was found: what it did not drop, it drops when it comes back.
        self._pause_limit.start()
        self._leftovers.start()
        self._taking = True

    async def worker_joined(self) -> None:
        """There is a worker that was not there before: its limits count, and rows of gone sessions are dropped."""
        self._info = worker_info_from_wire(await self._worker.describe())
        await self._worker.retain(await self._known())

    async def _known(self) -> wire.RetainRequest:
        """The sessions there are, and the pages that are left of others."""
        kept = await self._catalog.page_refs.get_retained()
        return wire.RetainRequest(
            sessions=await self._catalog.sessions.get_ids(),
            shared=[wire.SharedPages(owner=each.owner, pages=each.pages) for each in kept],
        )

    async def stop(self) -> None:
        """Take nothing new, let running turns end (for a bounded time), then close worker and catalog."""
        self._taking = False
        if self._running:
            await asyncio.wait(self._running, timeout=self.settings.drain_seconds)
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)
        await self._pause_limit.stop()
        await self._leftovers.stop()
        await self._resting.stop()
        await self._worker.close()
        await self._catalog.close()

    async def create(self, request: CreateSession, key: IdempotencyKey | None = None) -> Session:
        """Open a session. Raises BudgetOutOfRange, UnknownMethod, UnknownModel, QuotaExceeded, WorkerRefused."""
        self._check_taking()
        async with self._creating:
            if key is not None and (told := await self._catalog.idempotency.get(key)) is not None:
                return SESSION.validate_json(told)
            await self._tenants.check_quota(request.tenant)
            return await run_to_completion(
                self._create(resolve_settings(request, self.info, self.settings), key)
            )

    async def _create(self, settings: SessionSettings, key: IdempotencyKey | None) -> Session:
        now = time.time()
        session = Session(
            f"s_{secrets.token_hex(12)}",
            1,
            settings,
            now,
            now,
            0,
            MemoryReport(budget=settings.budget),
        )
        session = replace(session, worker=await self._placed(session))
        answer = (
            None if key is None else IdempotencyRecord(key, SESSION.dump_json(session).decode())
        )
        try:
            await self._catalog.sessions.create(session, b"", answer)
        except ServiceError:
            with suppress(ServiceError):  # it has no rows yet
                await self._worker.drop(wire.DropRequest(session=session.id))
            raise
        self._sessions.created(session)
        return session

    async def _placed(self, session: Session) -> str:
        """The worker in which the new session was opened: another one if the first is lost. Raises WorkerLost."""
        lost: list[str] = []
        while True:
            worker = self._worker.place(session.id, "", lost)
            try:
                await self._worker.open(
                    wire.OpenRequest(spec=session_spec_to_wire(session, session.epoch))
                )
            except (WorkerLost, WorkerRefused) as error:
                lost.append(worker)
                if not self._sessions.may_go_elsewhere(session.id, lost, error):
                    raise
            else:
                return worker

    async def get(self, session: str) -> tuple[Session, SessionState]:
        """The session as committed, and what it does now. Raises UnknownSession."""
        found = await self._catalog.sessions.get(session)
        return found, self._state_of(found)

    def _state_of(self, session: Session) -> SessionState:
        live = self._sessions.known(session.id)
        return session.committed_state if live is None or live.at_rest else live.state

    async def check_tenant(self, session: str, tenant: str) -> None:
        """Another tenant's session is as unknown as one that is not there. Raises UnknownSession.

        That a session is not there is left to whoever asks for it: a repeated call may have been answered before.
        """
        await self._tenants.check_not_anothers(session, tenant)

    async def page(
        self, limit: int, cursor: str | None, tenant: str = ""
    ) -> tuple[SessionPage, list[SessionState]]:
        """Some of a tenant's sessions, newest first, and what each does now.

        Raises InvalidRequest for a wrong cursor.
        """
        page = await self._catalog.sessions.get_page(limit, cursor, tenant)
        return page, [self._state_of(session) for session in page.sessions]

    async def turns(self, session: str, after: int, limit: int) -> list[Turn]:
        """Committed turns of a session, in order."""
        await self._catalog.sessions.get(session)
        return await self._catalog.turns.get_after(session, after, limit)

    async def delete(self, session: str, key: IdempotencyKey | None = None) -> None:
        """Forget a session and its rows. Raises UnknownSession, and SessionBusy while a turn runs."""
        self._check_taking()
        if key is not None and await self._catalog.idempotency.get(key) is not None:
            return
        live = self._sessions.of(await self._catalog.sessions.get(session))
        async with self._sessions.claim_turn(live, wait=False):
            await run_to_completion(self._delete(live, key))

    async def _delete(self, live: ActiveSession, key: IdempotencyKey | None) -> None:
        await self._resting.cancel(live)
        leftovers = await self._catalog.sessions.delete(
            live.id, None if key is None else IdempotencyRecord(key, "{}")
        )
        self._sessions.forget(live)
        self._observers.publish(SessionDeleted(live.id))
        await self._leftovers.drop(leftovers)

    async def move(self, session: str, worker: str | None) -> Session:
        """Have the session go on in the named worker, or in the best of the others; the session as it is then.

        What is committed is opened there, and nothing is computed. Raises UnknownSession, SessionBusy, InvalidRequest
        for an unknown worker, WorkerUnavailable.
        """
        self._check_taking()
        live = self._sessions.of(await self._catalog.sessions.get(session))
        try:
            async with self._sessions.claim_turn(live, wait=False):
                await self._resting.settle(live, wait=False)
                await run_to_completion(self._move(live, worker))
        finally:
            self._resting.resume(live)
        return await self._catalog.sessions.get(session)

    async def _move(self, live: ActiveSession, worker: str | None) -> None:
        started = time.monotonic()
        left = live.claim.worker
        target = await self._target(live, worker)
        if target != left:
            await self._sessions.move(live, target)
            self._observers.publish(SessionMoved(live.id, left, target, time.monotonic() - started))

    async def _target(self, live: ActiveSession, worker: str | None) -> str:
        """Where the session is to go. Raises InvalidRequest, WorkerUnavailable."""
        known = [each.name for each in await self._worker.workers()]
        if len(known) < 2:
            raise InvalidRequest(
                "worker", "there is one worker only: a session can move where there are several"
            )
        if worker is not None and worker not in known:
            raise InvalidRequest(
                "worker", f"worker {worker!r} is none of {', '.join(sorted(known))}"
            )
        avoid = (
            [live.claim.worker] if worker is None else [each for each in known if each != worker]
        )
        try:
            return self._worker.place(live.id, worker or "", avoid)
        except WorkerLost as error:
            raise WorkerUnavailable(f"no worker takes the session now: {error.message}") from error

    async def workers(self) -> list[wire.WorkerRecord]:
        """The workers that can be reached, with what each has to do."""
        return await self._worker.workers()

    async def fork(
        self, session: str, request: NewFork, key: IdempotencyKey | None = None
    ) -> Session:
        """Open a session that begins as another was at the end of a turn. Raises as `ForkRunner.fork`."""
        self._check_taking()
        return await self._forks.fork(session, request, key, self.info.page_tokens)

    def turn(
        self, session: str, request: TurnRequest, key: IdempotencyKey | None = None
    ) -> TurnStream:
        """Start a turn; its stream raises what went wrong, and closing it early cancels the turn."""
        self._check_taking()
        stream = TurnStream(self._turns.run(session, request, key))
        self._running.add(stream.task)
        stream.task.add_done_callback(self._running.discard)
        return stream

    async def event(
        self, session: str, event: ToolEvent, key: IdempotencyKey | None = None
    ) -> EventReceipt:
        """Keep a report of a tool call and begin the repair it calls for.

        A report of a call whose turn is being committed waits for it. Raises UnknownSession, UnknownCall,
        ResultConflict, LimitExceeded, InvalidRequest, SessionBusy.
        """
        self._check_taking()
        live = self._sessions.of(await self._catalog.sessions.get(session))
        async with self._sessions.claim(live):
            if key is not None and (told := await self._catalog.idempotency.get(key)) is not None:
                return RECEIPT.validate_json(told)
            return await run_to_completion(self._event(live, event, key))

    async def _event(
        self, live: ActiveSession, event: ToolEvent, key: IdempotencyKey | None
    ) -> EventReceipt:
        session = await self._catalog.sessions.get(live.id)
        call = await self._catalog.tool_calls.get(live.id, event.call_id)
        changed = apply_event(session, call, event, self.settings)
        acknowledged = receipt(session, changed, event, live.state, late=is_late(call, event))
        if changed is not call or key is not None:
            answer = (
                None
                if key is None
                else IdempotencyRecord(key, RECEIPT.dump_json(acknowledged).decode())
            )
            await self._catalog.tool_calls.commit(
                live.id, changed, await self._sessions.epoch(live), answer
            )
        if due_repairs(await self._catalog.sessions.get(live.id)):
            self._resting.begin_repairs(live)
        return acknowledged

    async def episodes(self, session: str) -> tuple[Session, EpisodeSet]:
        """The session, and its episodes as they were committed last. Raises UnknownSession."""
        return await self._catalog.sessions.get(session), await self._catalog.episodes.get(session)

    async def repairs(self, session: str, limit: int) -> list[RepairHistoryEntry]:
        """The session's last repairs, the newest first, with the text they brought back. Raises UnknownSession."""
        return await load_repair_history(self._catalog, self._worker, session, limit)

    async def memory(self, session: str) -> MemoryReport:
        """What the session holds. Raises UnknownSession."""
        return await self._sessions.memory(await self._catalog.sessions.get(session))

    async def stats(self) -> dict[str, wire.WorkerStats]:
        """The counters of each worker that can be reached. Raises WorkerLost when none can."""
        return await self._worker.stats()

    def _check_taking(self) -> None:
        if not self._taking:
            raise ShuttingDown(
                "the service is not taking requests now", self.settings.retry_after_seconds
            )


def _resting(
    catalog: Catalog,
    worker: Worker,
    sessions: SessionManager,
    observers: EventBus,
    settings: ServiceLimits,
) -> BackgroundTasks:
    pauses = RepairRunner(catalog, worker, sessions, observers, settings)
    return BackgroundTasks(
        sessions, pauses, EpisodeMaintainer(catalog, worker, sessions, observers)
    )
