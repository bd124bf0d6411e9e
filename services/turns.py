"""One turn, from its claim on the session to its commit."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from pydantic import TypeAdapter

from kvrecall.domain.codes import ErrorCode
from kvrecall.domain.errors import (
    InvalidRequest,
    ServiceError,
    UnknownSession,
    WorkerLost,
    WorkerRefused,
)
from kvrecall.domain.events import EpisodesFailed, EventBus, TurnFailed, TurnFinished, TurnRetried
from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.messages import Message
from kvrecall.domain.repairs import due_repairs
from kvrecall.domain.reports import TurnOutcome
from kvrecall.domain.session import Session, Turn
from kvrecall.domain.session_settings import RepairTrigger
from kvrecall.domain.state_machine import SessionEvent
from kvrecall.domain.turn_request import TurnPlan, TurnRequest, plan_turn
from kvrecall.protocol.convert import (
    call_from_wire,
    episode_from_wire,
    fidelity_from_wire,
    memory_from_wire,
    message_from_wire,
    message_to_wire,
    repair_from_wire,
    sampling_to_wire,
)
from kvrecall.protocol.v1 import worker_pb2 as wire
from services.admission import Admission
from services.background import BackgroundTasks
from services.cancellation import run_to_completion
from services.catalog.base import Catalog, IdempotencyKey, IdempotencyRecord, TurnCommit
from services.cluster.worker_client import Worker
from services.episode_router import EpisodeRouter, Match
from services.prefix_sharing import FirstTurn, PrefixSharing
from services.quotas import Quotas
from services.repair_runner import repair_details, signal_text
from services.session_manager import ActiveSession, SessionManager
from services.stream_resume import StreamResumer
from services.turn_stream import TextDelta, ToolCallEmitted, TurnEnded, TurnProgress, TurnStarted

OUTCOME = TypeAdapter(TurnOutcome)
_MOST_REBUILDS = 2
"""For one turn: a page may break while others are computed again."""


class TurnRunner:
    """Runs turns: one at a time per session, so many at once over all."""

    def __init__(
        self,
        catalog: Catalog,
        worker: Worker,
        sessions: SessionManager,
        resting: BackgroundTasks,
        matcher: EpisodeRouter,
        prefixes: PrefixSharing,
        tenants: Quotas,
        admission: Admission,
        observers: EventBus,
        settings: ServiceLimits,
    ) -> None:
        self._catalog = catalog
        self._worker = worker
        self._sessions = sessions
        self._resting = resting
        self._matcher = matcher
        self._prefixes = prefixes
        self._tenants = tenants
        self._admission = admission
        self._observers = observers
        self._settings = settings

    async def run(
        self, session: str, request: TurnRequest, key: IdempotencyKey | None
    ) -> AsyncGenerator[TurnProgress, None]:
        """The progress of a turn, up to `TurnEnded`. Raises a ServiceError; an unfinished turn changes nothing."""
        try:
            async with aclosing(self._run(session, request, key)) as progress:
                async for item in progress:
                    yield item
        except ServiceError as error:
            self._observers.publish(TurnFailed(session, error.code))
            raise
        except (asyncio.CancelledError, GeneratorExit):
            self._observers.publish(TurnFailed(session, ErrorCode.CANCELLED))
            raise

    async def _run(
        self, session_id: str, request: TurnRequest, key: IdempotencyKey | None
    ) -> AsyncGenerator[TurnProgress, None]:
        arrived = time.monotonic()
        if (told := await self._told_before(key)) is not None:
            for item in _retold(told):
                yield item
            return
        live = self._sessions.of(await self._catalog.session(session_id))
        try:
            async with (
                self._sessions.claim_turn(live, request.queue),
                aclosing(self._claimed(live, request, key, arrived)) as progress,
            ):
                async for item in progress:
                    yield item
        finally:
            self._resting.resume(live)

    async def _claimed(
        self, live: ActiveSession, request: TurnRequest, key: IdempotencyKey | None, arrived: float
    ) -> AsyncGenerator[TurnProgress, None]:
        """The turn of whoever is the session's one writer."""
        if (told := await self._told_before(key)) is not None:
            for item in _retold(told):
                yield item
            return
        await self._check(live, request)
        async with self._admission.place():
            await self._resting.settle(live, request.wait_for_repairs)
            await self._sessions.epoch(
                live
            )  # nobody writes the session from here on, in no process
            session = await self._catalog.session(live.id)
            plan = plan_turn(session, request, self._settings)
            yield TurnStarted(live.id, plan.number)
            waited = time.monotonic() - arrived
            match = await self._matcher.match(session, plan.messages)
            first = await self._prefixes.first_turn(session, plan.messages)
            work = _Work(live, session, request, plan, key, waited, match, first)
            async with aclosing(self._compute(work)) as progress:
                async for item in progress:
                    yield item

    async def _told_before(self, key: IdempotencyKey | None) -> TurnOutcome | None:
        answer = None if key is None else await self._catalog.recall(key)
        return None if answer is None else OUTCOME.validate_json(answer)

    async def _check(self, live: ActiveSession, request: TurnRequest) -> None:
        """Refuse what is wrong before any repair is run, or broken off, for it."""
        session = await self._catalog.session(live.id)
        plan_turn(session, request, self._settings)
        await self._tenants.check_quota(session.settings.tenant)
        if request.compare_with:
            try:
                await self._tenants.check_owner(request.compare_with, session.settings.tenant)
            except UnknownSession as error:
                raise InvalidRequest("logprobs.compare_with", error.message) from error

    async def _compute(self, work: "_Work") -> AsyncGenerator[TurnProgress, None]:
        """The turn in the session's worker; in another one, from the beginning, when that is lost before the commit.

        In the same one again when it found in the middle that pages are lost.
        """
        told = StreamResumer()
        lost = list[str]()
        rebuilds = 0
        missing = False
        while True:
            try:
                async with aclosing(self._attempt(work, told, lost, missing)) as progress:
                    async for item in progress:
                        yield item
                return
            except (WorkerLost, WorkerRefused) as error:
                missing = error.code is ErrorCode.ROWS_MISSING
                if missing and rebuilds < _MOST_REBUILDS and not told.differs:
                    rebuilds += 1
                    continue
                lost.append(work.live.claim.worker)
                if told.differs or not self._sessions.may_go_elsewhere(work.live.id, lost, error):
                    raise
                self._observers.publish(
                    TurnRetried(work.live.id, lost[-1], error.code, error.message)
                )

    async def _attempt(
        self, work: "_Work", told: StreamResumer, lost: Sequence[str], pages_missing: bool
    ) -> AsyncGenerator[TurnProgress, None]:
        live = work.live
        outcome = None
        if pages_missing:
            await self._sessions.rebuild(live)
        request = _wire_turn(work, await self._sessions.ensure_open(live, lost))
        told.begin()
        live.advance(SessionEvent.TURN_STARTED)
        live.in_doubt = True
        try:
            async with aclosing(self._events(live, request)) as events:
                async for event in events:
                    match event.WhichOneof("event"):
                        case "token":
                            live.advance(SessionEvent.TOKEN_GENERATED)
                            if (text := told.text(event.token.text)) is not None:
                                yield TextDelta(text)
                        case "tool_call":
                            if told.call(call := call_from_wire(event.tool_call)):
                                yield ToolCallEmitted(call)
                        case "done":
                            told.end()
                            outcome = await run_to_completion(
                                self._finish(work, event.done, request.epoch)
                            )
                            break  # it is committed, whatever becomes of the worker
            if outcome is None:
                raise WorkerLost("the worker ended the turn without an answer")
        finally:
            if live.in_turn:  # else it was committed, and a repair may have begun
                live.roll_back(work.session)
        yield TurnEnded(outcome)

    async def _events(
        self, live: ActiveSession, request: wire.TurnRequest
    ) -> AsyncGenerator[wire.TurnEvent, None]:
        """What the worker tells of the turn; a refusal before that is helped, if it can be, once for each reason."""
        helped = set[ErrorCode]()
        told = False
        while True:
            try:
                async with aclosing(self._worker.turn(request)) as events:
                    async for event in events:
                        told = True
                        yield event
                return
            except WorkerRefused as refusal:
                if told or refusal.code in {*helped, ErrorCode.ROWS_MISSING}:
                    raise
                helped.add(refusal.code)
                await self._help(live, request, refusal)

    async def _help(
        self, live: ActiveSession, request: wire.TurnRequest, refusal: WorkerRefused
    ) -> None:
        """Leave out an episode that cannot be used, as no turn fails by it; or open the session anew.

        Raises the refusal where neither helps.
        """
        if refusal.code is not ErrorCode.BAD_EPISODE or not request.HasField("episode"):
            request.epoch = await self._sessions.reopen(live, request.epoch, refusal)
            return
        request.ClearField("episode")
        self._observers.publish(EpisodesFailed(live.id, "switch", refusal.code, refusal.message))

    async def _finish(self, work: "_Work", done: wire.TurnDone, epoch: int) -> TurnOutcome:
        """Commit the turn, then begin the pause it ends on."""
        live = work.live
        message = message_from_wire(done.message) if done.HasField("message") else None
        outcome = _outcome(work, done, message)
        calls = work.plan.asks
        if message is not None and done.finish_reason == "tool_calls":
            calls = message.tool_calls
        commit = TurnCommit(
            _turn(work, done, outcome),
            done.state.SerializeToString(deterministic=True),
            calls,
            work.plan.inline_results,
            matched="" if work.match is None else work.match.episode,
            active=done.state.episode,
            repaired=repair_details(signal_text(work.plan.messages), done.repair),
        )
        if work.first is not None:
            commit = work.first.completed(commit, done)
        answer = (
            None
            if work.key is None
            else IdempotencyRecord(work.key, OUTCOME.dump_json(outcome).decode())
        )
        await self._catalog.commit_turn(commit, epoch, answer)
        live.in_doubt = False
        live.repairs_wanted = False
        live.advance(SessionEvent.CALLS_EMITTED if calls else SessionEvent.TURN_ENDED)
        self._observers.publish(TurnFinished(outcome))
        if calls or work.session.settings.repairs_on(RepairTrigger.LAST_OUTPUT):
            self._resting.begin_repairs(live)
        return outcome


@dataclass(frozen=True)
class _Work:
    live: ActiveSession
    session: Session
    request: TurnRequest
    plan: TurnPlan
    key: IdempotencyKey | None
    waited: float
    match: Match | None
    first: FirstTurn | None


def _retold(outcome: TurnOutcome) -> list[TurnProgress]:
    """The progress of a turn that was answered before, in as few pieces as it can be told."""
    progress: list[TurnProgress] = [TurnStarted(outcome.session, outcome.turn)]
    if outcome.message is not None:
        if outcome.message.content:
            progress.append(TextDelta(outcome.message.content))
        progress += [ToolCallEmitted(call) for call in outcome.message.tool_calls]
    return [*progress, TurnEnded(outcome)]


def _wire_turn(work: _Work, epoch: int) -> wire.TurnRequest:
    return wire.TurnRequest(
        session=work.live.id,
        epoch=epoch,
        messages=[message_to_wire(message) for message in work.plan.messages],
        generate=work.request.generate,
        sampling=sampling_to_wire(work.plan.sampling),
        repair=work.plan.repair,
        repair_seconds=work.session.settings.repair_seconds or 0.0,
        keep_distribution=work.request.keep_distribution,
        compare_with=work.request.compare_with,
        episode=None if work.match is None else work.match.load,
        prefix=None if work.first is None else work.first.offered,
    )


def _turn(work: _Work, done: wire.TurnDone, outcome: TurnOutcome) -> Turn:
    return Turn(
        session=work.live.id,
        number=work.plan.number,
        messages=work.plan.messages,
        token_ids=tuple(done.token_ids),
        outcome=outcome,
        utterance_tokens=tuple(done.utterance_tokens),
    )


def _outcome(work: _Work, done: wire.TurnDone, message: Message | None) -> TurnOutcome:
    own_repair = repair_from_wire(done.repair) if done.HasField("repair") else None
    repairs = work.session.repairs
    match = work.match
    matching = {} if match is None else {"match": match.seconds}
    return TurnOutcome(
        session=work.live.id,
        turn=work.plan.number,
        message=message,
        finish_reason=done.finish_reason,
        prompt_tokens=done.prompt_tokens,
        output_tokens=done.output_tokens,
        memory=memory_from_wire(done.memory),
        repairs=repairs if own_repair is None else (*repairs, own_repair),
        seconds={"waiting": work.waited, **matching, **dict(done.seconds)},
        fidelity=fidelity_from_wire(done),
        own_repair=own_repair,
        episode=None if match is None else episode_from_wire(match.episode, match.similarity, done),
        repairs_skipped=len(due_repairs(work.session)),
        durable=done.durable,
    )
