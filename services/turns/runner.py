"""One turn, from exclusive access to the session to its commit."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace

import structlog

from kvrecall.domain.codes import ErrorCode
from kvrecall.domain.errors import (
    InvalidRequest,
    ServiceError,
    UnknownSession,
    WorkerLost,
    WorkerRefused,
)
from kvrecall.domain.events import (
    AnswerReplayed,
    EpisodesFailed,
    TurnFailed,
    TurnFinished,
    TurnRetried,
    TurnStarted,
)
from kvrecall.domain.fairness.share import DECODED_TOKENS, Share
from kvrecall.domain.phases import Phase
from kvrecall.domain.sessions.session import Session
from kvrecall.domain.sessions.state_machine import SessionEvent
from kvrecall.domain.settings.session import RepairTrigger
from kvrecall.domain.turn_request import TurnRequest, plan_turn
from kvrecall.domain.worker_info import WorkerInfo
from kvrecall.protocol.convert import call_from_wire, logprob_from_wire, worker_info_from_wire
from kvrecall.protocol.v1 import worker_pb2 as pb
from kvrecall.telemetry.spans import span
from services.access.shares import get_share
from services.background import BackgroundTasks
from services.cancellation import run_to_completion
from services.catalog.records import IdempotencyKey, IdempotencyRecord, KeptState, TurnCommit
from services.catalog.serialization import OUTCOME, pack
from services.context import ServiceContext
from services.episodes import EpisodeRouter
from services.grammars import ConstraintChecks
from services.memories.finder import MemoryFinder
from services.repairs.runner import repair_details, signal_text
from services.sessions.active import ActiveSession
from services.sessions.log_end import read_log_end
from services.sessions.manager import may_have_changed
from services.sessions.worker_states import pack_kept, pack_state
from services.streams.resume import StreamResumer
from services.streams.turn import Publish, replay
from services.turns.clock import TurnClock
from services.turns.context import TurnContext

# Rebuilds within one turn: a page may break while others are rebuilt.
_MAX_REBUILDS = 2
_PACKED_AT_ONCE_BYTES = 8192


class TurnRunner:
    """Runs turns: one at a time per session, a bounded number over all sessions."""

    def __init__(
        self, context: ServiceContext, background: BackgroundTasks, router: EpisodeRouter
    ) -> None:
        self._context = context
        self._background = background
        self._router = router
        self._memory = MemoryFinder(context)
        self._info: WorkerInfo | None = None
        self._constraints = ConstraintChecks(context.grammars)

    async def run(
        self,
        session: str,
        request: TurnRequest,
        publish: Publish,
        call_format: str,
        key: IdempotencyKey | None = None,
        tenant: str | None = None,
    ) -> None:
        """Run a turn and publish its progress, up to `TurnFinished`.

        `call_format`: the form of the model's calls. With a `tenant`, another tenant's session is
        unknown. Raises a ServiceError; a turn that is not committed changes nothing.
        """
        with span("chat"):  # its attributes come from the events that are published within
            try:
                await self._run(session, request, publish, call_format, key, tenant)
            except ServiceError as error:
                self._context.events.publish(TurnFailed(session, error.code))
                raise
            except asyncio.CancelledError:
                self._context.events.publish(TurnFailed(session, ErrorCode.CANCELLED))
                raise

    async def _run(
        self,
        session_id: str,
        request: TurnRequest,
        publish: Publish,
        call_format: str,
        key: IdempotencyKey | None,
        tenant: str | None,
    ) -> None:
        clock = TurnClock()
        if await self._replay(session_id, key, publish):
            return
        # The first of two reads of the session: who owns it, and what to refuse early.
        session = await self._context.catalog.sessions.get(session_id, tenant)
        live = self._context.sessions.activate(session)
        structlog.contextvars.bind_contextvars(session=session.id)  # in this turn's own task
        try:
            async with AsyncExitStack() as held:
                with span("claim"):
                    claim = self._context.sessions.claim_turn(live, request.queue)
                    await held.enter_async_context(claim)
                if await self._replay(session_id, key, publish):
                    return
                await self._check(session, request, call_format)
                share = get_share(
                    self._context.limits, live.tenant, live.id, background=request.background
                )
                with span("admission"):
                    await held.enter_async_context(self._context.admission.slot(share))
                turn = await self._begin(live, request, publish, key, clock, share)
                with self._context.worker.count_turn(live.id):
                    await self._compute(turn, publish)
        finally:
            self._background.resume(live)

    async def _replay(self, session: str, key: IdempotencyKey | None, publish: Publish) -> bool:
        """Publish the outcome that is recorded under the key; return whether there is one."""
        record = None if key is None else await self._context.catalog.idempotency.get(key)
        if record is None:
            return False
        for progress in replay(OUTCOME.validate_json(record)):
            publish(progress)
        self._context.events.publish(AnswerReplayed(session))
        return True

    async def _check(self, session: Session, request: TurnRequest, call_format: str) -> None:
        """Refuse an invalid turn before a repair is interrupted for it.

        A turn that queued behind others is planned only once it is its own: they change the
        session.
        """
        if not request.queue:
            plan_turn(session, request, self._context.limits)
        if request.sampling is not None:
            constraint = request.sampling.constraint
            settings = session.settings
            await self._constraints.check(constraint, settings.tools, call_format, settings.tenant)
        await self._context.quotas.check_quota(session.settings.tenant, keep=session.id)
        if request.compare_with:
            try:
                await self._context.quotas.check_owner(
                    request.compare_with, session.settings.tenant
                )
            except UnknownSession as error:
                raise InvalidRequest("logprobs.compare_with", error.message) from error

    async def _begin(
        self,
        live: ActiveSession,
        request: TurnRequest,
        publish: Publish,
        key: IdempotencyKey | None,
        clock: TurnClock,
        share: Share,
    ) -> TurnContext:
        """Interrupt background work, take the session over, and plan against its committed state."""
        with span("settle repairs"):
            await self._background.yield_to_turn(live, request.wait_for_repairs)
        await self._context.sessions.epoch(live)  # no other process writes the session from here on
        session = await self._context.catalog.sessions.get(live.id)
        plan = plan_turn(session, request, self._context.limits)
        started = TurnStarted(live.id, plan.number)
        publish(started)
        self._context.events.publish(started)
        waited = clock.elapsed
        clock.begin_phase(Phase.MATCH)
        match = await self._router.match(session, plan.messages)
        info = await self._describe_worker()
        earlier = remembered = None
        if not request.prompt:
            clock.begin_phase(Phase.FIND)
            remembered = await self._memory.find(session, plan.messages, info.page_tokens)
        if session.turns and not request.prompt:
            earlier = await read_log_end(self._context.catalog, session, plan.messages, info)
        return TurnContext(
            live,
            session,
            request,
            plan,
            key,
            clock,
            waited,
            match,
            share,
            info.page_tokens,
            earlier=earlier,
            remembered=remembered,
        )

    async def _describe_worker(self) -> WorkerInfo:
        """Describe the workers, which are alike."""
        if self._info is None:
            self._info = worker_info_from_wire(await self._context.worker.describe())
        return self._info

    async def _compute(self, turn: TurnContext, publish: Publish) -> None:
        """Run the turn in the session's worker; retry it when that is lost before the commit.

        A lost worker means another one, from the committed state; missing pages mean a rebuild in
        the same one. Raises TurnQuarantined for a turn that may have killed several workers.
        """
        quarantine = self._context.quarantine
        quarantine.check(turn.live.id, turn.fingerprint)
        resumer = StreamResumer(publish)
        lost: list[str] = []
        rebuilds = 0
        rebuild = False
        while True:
            attempts = resumer.attempts
            try:
                if rebuild:
                    await self._context.sessions.rebuild(turn.live)
                await self._attempt(turn, resumer, publish, lost)
                quarantine.clear(turn.live.id)
                return
            except (WorkerLost, WorkerRefused) as error:
                if resumer.diverged:
                    raise
                ran = resumer.attempts > attempts
                died = ran and isinstance(error, WorkerLost)
                if died and not quarantine.add_death(turn.live.id, turn.fingerprint):
                    raise
                rebuild = error.code is ErrorCode.ROWS_MISSING
                if rebuild and rebuilds < _MAX_REBUILDS:
                    rebuilds += 1
                    continue
                lost.append(turn.live.claim.worker)
                if not self._context.sessions.can_retry_elsewhere(turn.live.id, lost, error):
                    raise
                turn = replace(turn, retries=len(lost))
                self._context.events.publish(
                    TurnRetried(turn.live.id, lost[-1], error.code, error.message)
                )

    async def _attempt(
        self, turn: TurnContext, resumer: StreamResumer, publish: Publish, lost: Sequence[str]
    ) -> None:
        live = turn.live
        epoch = await self._context.sessions.ensure_open(live, lost, turn.session, turn.family)
        resumer.begin()
        live.advance(SessionEvent.TURN_STARTED)
        live.needs_reopen = True
        try:
            await self._generate(turn, turn.to_wire(epoch), resumer, publish)
        except WorkerRefused as refusal:
            live.needs_reopen = may_have_changed(refusal)
            raise
        finally:
            if live.in_turn:  # else it was committed, and a repair may have started
                live.roll_back(turn.session)

    async def _generate(
        self,
        turn: TurnContext,
        request: pb.TurnRequest,
        resumer: StreamResumer,
        publish: Publish,
    ) -> None:
        """Follow the worker's events up to the commit.

        Recover from a refusal once for each reason.
        """
        admission = self._context.admission
        recovered = {ErrorCode.ROWS_MISSING}
        started = committed = False
        planned = pb.TurnPlanned()
        while True:
            turn.clock.ask_worker()
            try:
                async with aclosing(self._context.worker.turn(request)) as events:
                    async for event in events:
                        kind = event.WhichOneof("event")
                        started = started or kind != "planned"
                        match kind:
                            case "planned":
                                planned = event.planned
                                admission.charge(turn.share, planned.prompt_tokens)
                                tokens = planned.held_tokens + planned.prompt_tokens
                                if tokens + request.generate <= planned.max_tokens:
                                    resumer.planned(planned.held_tokens, planned.prompt_tokens)
                            case "token":
                                turn.clock.note_token()
                                admission.charge(turn.share, DECODED_TOKENS)
                                turn.live.advance(SessionEvent.TOKEN_GENERATED)
                                resumer.chunk(event.token)
                            case "arguments":
                                resumer.arguments(event.arguments)
                            case "tool_call":
                                resumer.call(call_from_wire(event.tool_call))
                            case "done":
                                resumer.end()
                                finished = await run_to_completion(
                                    self._commit(turn, event.done, request.epoch)
                                )
                                committed = True
                                scored = map(logprob_from_wire, event.done.prompt_logprobs)
                                outcome = replace(finished.outcome, prompt_logprobs=tuple(scored))
                                publish(replace(finished, outcome=outcome))
                                return
                raise WorkerLost("the worker ended the turn without an answer")
            except (WorkerLost, WorkerRefused) as error:
                if committed:
                    return  # whatever becomes of the worker, the turn stands
                if error.code is ErrorCode.TURN_TOO_LONG and planned.max_tokens:
                    tokens = planned.held_tokens + planned.prompt_tokens
                    error.details |= {"tokens": tokens, "limit": planned.max_tokens}
                if isinstance(error, WorkerLost) or started or error.code in recovered:
                    raise
                recovered.add(error.code)
                await self._recover_from_refusal(turn.live, request, error)

    async def _recover_from_refusal(
        self, live: ActiveSession, request: pb.TurnRequest, refusal: WorkerRefused
    ) -> None:
        """Leave out an episode that cannot be used, as no turn fails by it; or reopen the session.

        Raises the refusal when neither helps.
        """
        if refusal.code is not ErrorCode.BAD_EPISODE or not request.HasField("episode"):
            request.epoch = await self._context.sessions.reopen(live, request.epoch, refusal)
            return
        request.ClearField("episode")
        self._context.events.publish(
            EpisodesFailed(live.id, "switch", refusal.code, refusal.message)
        )

    async def _keep(self, done: pb.SessionState) -> KeptState | None:
        turns = self._context.limits.kept_states
        if not turns:
            return None
        state = pack_kept(done)
        # A small state takes less than the way to another thread and back.
        large = len(state) > _PACKED_AT_ONCE_BYTES
        if not large:
            return KeptState(pack(state), turns)
        loop = asyncio.get_running_loop()
        return KeptState(await loop.run_in_executor(self._context.packing, pack, state), turns)

    async def _commit(self, turn: TurnContext, done: pb.TurnDone, epoch: int) -> TurnFinished:
        """Commit the turn, then begin the pause that it ends on."""
        live = turn.live
        turn.clock.begin_commit()
        outcome = turn.outcome(done)
        calls = turn.plan.asks
        if outcome.message is not None and outcome.message.tool_calls:
            calls = outcome.message.tool_calls
        state, page_ids = pack_state(done.state)
        commit = TurnCommit(
            turn.committed(done, outcome),
            state,
            calls,
            turn.plan.inline_results,
            matched="" if turn.match is None else turn.match.episode,
            active=done.state.episode,
            repaired=repair_details(signal_text(turn.plan.messages), done.repair),
            history=turn.history(outcome.message),
            kept=await self._keep(done.state),
            lifetime=turn.session.settings.get_lifetime(turn.session.turns + 1),
            page_ids=page_ids,
        )
        record = None
        if turn.key is not None:
            record = IdempotencyRecord(turn.key, OUTCOME.dump_json(outcome).decode())
        with span("commit"):
            await self._context.quotas.keep_within(
                turn.session.settings.tenant,
                lambda limits: self._context.catalog.turns.commit(commit, epoch, record, limits),
                keep=live.id,
            )
        live.needs_reopen = False
        live.repairs_pending = False
        live.unsettled = done.pending_pages > 0
        live.started_calls.clear()  # a turn appends all results of the pause before it
        live.advance(SessionEvent.CALLS_EMITTED if calls else SessionEvent.TURN_ENDED)
        start = turn.describe_start(done)
        live.pause_began = time.monotonic() if calls else None
        live.repair_ended = None
        timing = turn.clock.finish(outcome.output_tokens)
        finished = TurnFinished(outcome, start, timing, turn.describe_run(epoch))
        self._context.events.publish(finished)
        if calls or turn.session.settings.repairs_on(RepairTrigger.LAST_OUTPUT):
            self._background.start_repairs(live)
        return finished
