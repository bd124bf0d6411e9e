"""The service's API: sessions, turns, tool events, forks, memory."""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any

from kvrecall.domain.errors import (
    DataKeyDeleted,
    InvalidRequest,
    ServiceError,
    ShuttingDown,
    WorkerLost,
    WorkerUnavailable,
)
from kvrecall.domain.events import CreationFailed, Observer, ServiceEvent, SessionMoved
from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.messages import Message, Sampling
from kvrecall.domain.reports import MemoryReport
from kvrecall.domain.sessions.request import CreateSession
from kvrecall.domain.sessions.session import Session, Turn
from kvrecall.domain.sessions.state_machine import SessionState
from kvrecall.domain.tool_events import EventReceipt, ToolEvent
from kvrecall.domain.turn_request import TurnRequest
from kvrecall.domain.worker_info import WorkerInfo
from kvrecall.protocol.convert import message_to_wire, worker_info_from_wire
from kvrecall.protocol.v1 import worker_pb2 as pb
from kvrecall.sandbox.settings import SandboxSettings
from kvrecall.telemetry.spans import span
from services.access.control import AccessControl
from services.access.shares import get_share
from services.background import BackgroundTasks
from services.cancellation import run_to_completion
from services.catalog.base import Catalog
from services.catalog.observed import CallObserver
from services.catalog.records import EpisodeSet, IdempotencyKey
from services.cluster.worker_client import Worker
from services.context import ServiceContext
from services.conversations.matching import Conversations
from services.conversations.named import NamedConversations
from services.conversations.responses import ResponseStore
from services.episodes import EpisodeRouter
from services.feed.activity import Activity
from services.feed.feed import Feed
from services.feed.relay import Relay
from services.feed.watching import Watching
from services.lifecycle.creation import SessionCreator
from services.lifecycle.deletion import Retention, SessionDeleter
from services.lifecycle.forks import ForkRequest, ForkRunner
from services.pages.collector import PageCollector
from services.pages.sweep import PageSweep
from services.reading.reader import SessionReader
from services.repairs.history import RepairHistoryEntry, load_repair_history
from services.sessions.active import ActiveSession
from services.status import ServiceStatus
from services.streams.turn import Publish, TurnStream
from services.tool_calls.reports import ToolReports
from services.tool_calls.timeouts import ToolCallTimeouts
from services.turns.runner import TurnRunner


class SessionService:
    """The service behind one object. Call `start` first and `stop` last.

    It owns the worker and the catalog that it is given: `stop` closes both. Without `access` every
    caller is believed while the catalog has no key. A `relay` carries events from and to the other
    gateways of the catalog. `sandbox` limits what grammars of requests may take.
    """

    def __init__(
        self,
        worker: Worker,
        catalog: Catalog,
        limits: ServiceLimits,
        access: AccessControl | None = None,
        relay: Relay | None = None,
        sandbox: SandboxSettings | None = None,
    ) -> None:
        self._context = ServiceContext.create(catalog, worker, limits, sandbox)
        catalog = self._catalog = self._context.catalog
        worker = self._worker = self._context.worker
        self.reading = SessionReader(catalog, worker, self.get_state, lambda: self.info)
        self._sessions = self._context.sessions
        self._quotas = self._context.quotas
        self._events = self._context.events
        self.feed = Feed(self._sessions, limits, relay)
        self.activity = Activity(self._sessions)
        self.watching = Watching(catalog, self._sessions, self.feed)
        for observer in (self.feed.observe, self.activity.observe):
            self._events.add(observer)
        self.access = access or AccessControl(catalog.api_keys)
        self._events.add(self.access.observe)
        self._background = BackgroundTasks(self._context)
        self._turns = TurnRunner(self._context, self._background, EpisodeRouter(self._context))
        self._creator = SessionCreator(self._context)
        self._forks = ForkRunner(self._context, self._background)
        self.responses = ResponseStore(catalog, self._quotas, limits)
        self.named_conversations = NamedConversations(catalog, self._quotas, limits)
        self._reports = ToolReports(self._context, self._background)
        self._timeouts = ToolCallTimeouts(self._context)
        self._collector = PageCollector(self._context)
        self._sweep = PageSweep(self._context)
        self.status = ServiceStatus(self._context, self._collector, self._sweep, self.feed)
        self._deleter = SessionDeleter(self._context, self._background, self._collector)
        self._retention = Retention(self._context, self._deleter)
        self._quotas.use(self._retention.make_room)
        self.conversations = Conversations(catalog, self, self._context.grammars)
        self._running: set[asyncio.Task[None]] = set()
        self._info: WorkerInfo | None = None
        self._accepting = False
        self._stop_at: float | None = None

    @property
    def limits(self) -> ServiceLimits:
        """Limits and defaults that the operator chose."""
        return self._context.limits

    @property
    def ready(self) -> bool:
        """True while new work is accepted and no stop was announced."""
        return self._accepting and self._stop_at is None

    @property
    def known_info(self) -> WorkerInfo | None:
        """Model, shape and limits of the workers; None until the first one has joined."""
        return self._info

    @property
    def info(self) -> WorkerInfo:
        """Model, shape and limits of the workers. Raises WorkerLost until the first has joined."""
        if self._info is None:
            raise WorkerLost(
                "no worker has joined yet: its model may still be loading, or it was left out, which "
                "the gateway's log says"
            )
        return self._info

    @property
    def default_sampling(self) -> Sampling:
        """Sampling of a turn that names nothing. Raises WorkerLost until a worker has joined."""
        return self.limits.build_sampling(self.info)

    def publish(self, event: ServiceEvent) -> None:
        """Tell the observers of something that was noticed before a request reached the service."""
        self._events.publish(event)

    def observe(self, observer: Observer) -> None:
        """Call `observer` with every event from now on."""
        self._events.add(observer)

    def observe_catalog(self, observer: CallObserver) -> None:
        """Call `observer` with every call of the catalog from now on."""
        self._context.catalog.observe(observer)

    async def start(self) -> None:
        """Learn the workers' limits, start the background work, then accept requests.

        Without a worker requests are refused as WorkerLost; one that joins later is asked then.
        """
        with suppress(WorkerLost):
            await self._learn()
        self._timeouts.start()
        self._collector.start()
        self._sweep.start()
        self._retention.start()
        self.feed.start()
        self._accepting = True

    async def worker_joined(self, worker: str) -> None:
        """Learn a new worker's limits, and begin to sweep it."""
        await self._learn()
        self._sweep.join(worker)

    async def _learn(self) -> None:
        self._info = worker_info_from_wire(await self._worker.describe())
        self._quotas.learn(self._info.token_bytes)

    def announce_stop(self) -> float:
        """Be no longer ready, though requests are accepted until `stop`.

        Returns the seconds until running turns are cancelled: `drain_seconds` after the first call.
        """
        if self._stop_at is None:
            self._stop_at = time.monotonic() + self.limits.drain_seconds
            self.feed.end()
        return max(0.0, self._stop_at - time.monotonic())

    async def stop(self) -> None:
        """Accept nothing new, wait for running turns (for a bounded time), then close worker and catalog."""
        remaining = self.announce_stop()
        self._accepting = False
        if self._running:
            await asyncio.wait(self._running, timeout=remaining)
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)
        await self._timeouts.stop()
        await self._retention.stop()
        await self._collector.stop()
        await self._sweep.stop()
        await self._background.stop()
        await self.feed.stop()
        self._context.close()
        await self._worker.close()
        await self.access.stop()  # charges what the worker's jobs computed up to now
        await self._catalog.close()

    async def create(
        self,
        request: CreateSession,
        key: IdempotencyKey | None = None,
        messages: Sequence[Message] = (),
    ) -> Session:
        """Open a session. Raises as `SessionCreator.create`.

        `messages`: those that it begins with, as far as they are known. It is opened in the worker
        that its first turn runs in then.
        """
        self._check_accepting()
        try:
            return await self._creator.create(request, self.info, key, messages)
        except ServiceError as error:
            self._events.publish(CreationFailed(request.tenant, error.code))
            raise

    async def get(self, session: str, tenant: str | None = None) -> tuple[Session, SessionState]:
        """Return the session as committed, and its state now. Raises UnknownSession.

        With a `tenant`, another tenant's session is unknown.
        """
        found = await self._catalog.sessions.get(session, tenant)
        return found, self.get_state(found)

    def get_state(self, session: Session) -> SessionState:
        """Return the state of a session now, as far as this process knows."""
        live = self._sessions.find(session.id)
        return session.committed_state if live is None or live.idle else live.state

    async def check_tenant(self, session: str, tenant: str) -> None:
        """Raise UnknownSession for another tenant's session, as for one that does not exist."""
        with suppress(DataKeyDeleted):  # the tenant may still delete it
            await self._catalog.sessions.get(session, tenant)

    async def turns(self, session: str, after: int, limit: int) -> list[Turn]:
        """List committed turns of a session, in order."""
        await self._catalog.sessions.get(session)
        return await self._catalog.turns.get_after(session, after, limit)

    async def delete(
        self, session: str, key: IdempotencyKey | None = None, tenant: str | None = None
    ) -> None:
        """Delete a session and its rows.

        With a `tenant`, another tenant's session is unknown. Raises UnknownSession, and SessionBusy
        while a turn runs.
        """
        self._check_accepting()
        await self._deleter.delete(session, key, tenant)

    async def delete_unused(self, session: Session) -> bool:
        """Delete a session unless a turn followed or one runs; return whether it was deleted."""
        return await self._deleter.delete_unused(session)

    def check_room(self, tenant: str) -> None:
        """Raise Overloaded if a tenant's turn that came now would be refused for want of room."""
        self._context.admission.check_room(get_share(self.limits, tenant))

    async def move(self, session: str, worker: str | None, tenant: str | None = None) -> Session:
        """Move the session to the named worker, or to the best of the others; return the session.

        The committed state is opened there and nothing is computed. With a `tenant`, another
        tenant's session is unknown. Raises UnknownSession, SessionBusy, InvalidRequest for an
        unknown worker, WorkerUnavailable.
        """
        self._check_accepting()
        live = self._sessions.activate(await self._catalog.sessions.get(session, tenant))
        try:
            async with self._sessions.claim_turn(live, wait=False):
                await self._background.yield_to_turn(live, wait=False)
                await run_to_completion(self._move(live, worker))
        finally:
            self._background.resume(live)
        return await self._catalog.sessions.get(session)

    async def _move(self, live: ActiveSession, worker: str | None) -> None:
        started = time.monotonic()
        left = live.claim.worker
        target = await self._target(live, worker)
        if target != left:
            with span("move"):
                await self._sessions.move(live, target)
            self._context.quarantine.clear(live.id)
            self._events.publish(SessionMoved(live.id, left, target, time.monotonic() - started))

    async def _target(self, live: ActiveSession, worker: str | None) -> str:
        """Choose the worker to move to. Raises InvalidRequest, WorkerUnavailable."""
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
            return self._worker.choose_worker(live.id, worker or "", avoid)
        except WorkerLost as error:
            raise WorkerUnavailable(f"no worker takes the session now: {error.message}") from error

    async def describe_workers(self) -> tuple[list[pb.WorkerRecord], dict[str, pb.WorkerStats]]:
        """List the workers that can be reached, with their load, and counters of those that answer."""
        try:
            stats = await self._worker.stats()
        except WorkerLost:
            stats = {}
        return await self._worker.workers(), stats

    async def fork(
        self,
        session: str,
        request: ForkRequest,
        key: IdempotencyKey | None = None,
        tenant: str | None = None,
    ) -> Session:
        """Create a session that begins at the end of another's turn.

        With a `tenant`, another tenant's session is unknown. Raises as `ForkRunner.fork`.
        """
        self._check_accepting()
        with span("fork"):
            return await self._forks.fork(session, request, key, tenant)

    def turn(
        self,
        session: str,
        request: TurnRequest,
        key: IdempotencyKey | None = None,
        tenant: str | None = None,
    ) -> TurnStream:
        """Start a turn. Its stream raises a ServiceError; closing it early cancels the turn.

        With a `tenant`, another tenant's session is unknown.
        """
        self._check_accepting()

        async def run(publish: Publish) -> None:
            call_format = self.info.call_format
            await self._turns.run(session, request, publish, call_format, key, tenant)

        stream = TurnStream(run)
        self._running.add(stream.task)
        stream.task.add_done_callback(self._running.discard)
        return stream

    def follow(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run work beside the turns: a stop waits for it as for them, then cancels it."""
        task = asyncio.create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def event(
        self,
        session: str,
        event: ToolEvent,
        key: IdempotencyKey | None = None,
        tenant: str | None = None,
    ) -> EventReceipt:
        """Record a tool event and start the repair that it calls for.

        An event of a call whose turn is being committed waits for the commit. With a `tenant`,
        another tenant's session is unknown. Raises UnknownSession, UnknownCall, ResultConflict,
        LimitExceeded, InvalidRequest, SessionBusy.
        """
        self._check_accepting()
        live = self._sessions.activate(await self._catalog.sessions.get(session, tenant))
        async with self._sessions.claim(live):
            if (recorded := await self._reports.find(key)) is not None:
                return recorded
            return await run_to_completion(self._reports.record(live, event, key))

    async def episodes(self, session: str, tenant: str | None = None) -> tuple[Session, EpisodeSet]:
        """Return the session and its committed episodes. Raises UnknownSession."""
        found = await self._catalog.sessions.get(session, tenant)
        return found, await self._catalog.episodes.get(session)

    async def repairs(
        self, session: str, limit: int, tenant: str | None = None
    ) -> list[RepairHistoryEntry]:
        """List the session's last repairs, newest first, with the text they promoted.

        Raises UnknownSession.
        """
        if tenant is not None:
            await self.check_tenant(session, tenant)
        return await load_repair_history(self._catalog, self._worker, session, limit)

    async def count_tokens(
        self,
        messages: Sequence[Message],
        tools: Sequence[str],
        opening: str = "",
        template_arguments: str = "{}",
    ) -> int:
        """Count the tokens of a prompt, as a new session would append it, with the answer's `opening`.

        `template_arguments`: as of the session. Raises WorkerRefused if the model's template refuses
        the messages.
        """
        request = pb.TokenizeRequest(
            messages=map(message_to_wire, messages),
            tools=tools,
            opening=opening,
            template_arguments=template_arguments,
        )
        return len((await self.tokenize(request)).ids)

    async def tokenize(self, request: pb.TokenizeRequest) -> pb.TokenizeResult:
        """Return the tokens of a prompt or of a text. Raises as `count_tokens`."""
        return await self._worker.tokenize(request)

    async def tokenize_text(self, text: str, special_tokens: bool) -> tuple[int, ...]:
        """Return the tokens of a text, with the special ones that the tokenizer puts around it."""
        request = pb.TokenizeRequest(text=text, special_tokens=special_tokens)
        return tuple((await self._worker.tokenize(request)).ids)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included. Raises WorkerRefused for unknown ones."""
        chunk = pb.TokenChunk(ids=token_ids)
        return (await self._worker.detokenize(pb.DetokenizeRequest(chunks=[chunk]))).texts[0]

    async def memory(self, session: str, tenant: str | None = None) -> MemoryReport:
        """Report what the session holds. Raises UnknownSession."""
        return await self._sessions.memory(await self._catalog.sessions.get(session, tenant))

    def _check_accepting(self) -> None:
        if not self._accepting:
            raise ShuttingDown(
                "the service is shutting down; send the request again",
                self.limits.retry_after_seconds,
            )
