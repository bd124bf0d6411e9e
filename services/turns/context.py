"""A turn on its way: what it asks of the worker, and what it is committed as."""

import time
from dataclasses import dataclass
from hashlib import blake2b

from kvrecall.domain.events import TurnRun, TurnStart
from kvrecall.domain.fairness.share import Share
from kvrecall.domain.messages import Message
from kvrecall.domain.phases import Phase
from kvrecall.domain.repairs import due_repairs
from kvrecall.domain.reports import Sender, TurnOutcome
from kvrecall.domain.sessions.session import Session, Turn
from kvrecall.domain.turn_request import TurnPlan, TurnRequest
from kvrecall.protocol.convert import (
    episode_from_wire,
    fidelity_from_wire,
    memory_from_wire,
    message_from_wire,
    message_to_wire,
    prefill_from_wire,
    remembered_from_wire,
    repair_from_wire,
    reselections_from_wire,
    retrieval_from_wire,
    rewrite_from_wire,
    sampling_to_wire,
)
from kvrecall.protocol.v1 import worker_pb2 as pb
from kvrecall.telemetry.spans import current_span
from kvrecall.telemetry.wire import get_request_id
from services.access.principals import get_current_principal
from services.catalog.records import IdempotencyKey
from services.cluster.prompt_family import prompt_family
from services.conversations.histories import extend
from services.episodes import Match
from services.memories.finder import Remembered
from services.sessions.active import ActiveSession
from services.turns.clock import TurnClock


@dataclass(frozen=True)
class TurnContext:
    """One turn on its way.

    The session as committed, the plan, how long it `waited` in seconds, its share of the service,
    the tokens of a page, and the number of its `retries` in other workers. `earlier`: the log's end,
    which it may rewrite. `remembered`: what it sees of other sessions.
    """

    live: ActiveSession
    session: Session
    request: TurnRequest
    plan: TurnPlan
    key: IdempotencyKey | None
    clock: TurnClock
    waited: float
    match: Match | None
    share: Share
    page_tokens: int
    earlier: pb.Earlier | None = None
    remembered: Remembered | None = None
    retries: int = 0

    @property
    def family(self) -> str:
        """The prompt family of a session's first turn; empty for a later one."""
        return (
            "" if self.session.turns else prompt_family(self.session.settings, self.plan.messages)
        )

    def to_wire(self, epoch: int) -> pb.TurnRequest:
        """Build the worker's request."""
        return pb.TurnRequest(
            session=self.live.id,
            epoch=epoch,
            messages=[message_to_wire(message) for message in self.plan.messages],
            generate=self.request.generate,
            sampling=sampling_to_wire(self.plan.sampling),
            repair=self.plan.repair,
            defer_repair=self.plan.defer_repair,
            keep_distribution=self.request.keep_distribution,
            compare_with=self.request.compare_with,
            episode=None if self.match is None else self.match.load,
            length=self.session.memory.rows,
            prompt=self.request.prompt,
            opening=self.request.opening,
            flow=self.share.flow,
            background=self.share.background,
            earlier=self.earlier,
            remembered=() if self.remembered is None else self.remembered.passages,
        )

    def describe_start(self, done: pb.TurnDone) -> TurnStart:
        """Describe what the turn began with; to be called before the session's next pause."""
        shared = None if self.session.turns else done.shared_pages * self.page_tokens
        return TurnStart(
            remembered_tokens=self.session.memory.length,
            pause=self.clock.seconds_since(self.live.pause_began),
            repair_lead=self.clock.seconds_since(self.live.repair_ended),
            after_pause=bool(self.session.calls),
            shared_tokens=shared,
        )

    def history(self, reply: Message | None) -> str:
        """Digest the conversation up to the end of the turn; empty if it is not looked for."""
        digest = self.request.history
        return (extend(digest, reply) if digest and reply is not None else digest).hex()

    def fingerprint(self) -> str:
        """Digest what the client asked for: the same turn in the same place of the session."""
        request = pb.TurnRequest(
            messages=[message_to_wire(message) for message in self.plan.messages],
            generate=self.request.generate,
            sampling=sampling_to_wire(self.plan.sampling),
            prompt=self.request.prompt,
            opening=self.request.opening,
        )
        text = f"{self.plan.number} ".encode() + request.SerializeToString(deterministic=True)
        return blake2b(text, digest_size=16).hexdigest()

    def committed(self, done: pb.TurnDone, outcome: TurnOutcome) -> Turn:
        """Build the turn as it is committed."""
        return Turn(
            session=self.live.id,
            number=self.plan.number,
            messages=self.plan.messages,
            token_ids=tuple(done.token_ids),
            outcome=outcome,
            utterance_tokens=tuple(done.utterance_tokens),
        )

    def describe_run(self, epoch: int) -> TurnRun:
        """Describe how the turn was run, for people."""
        method = self.session.settings.method
        return TurnRun(self.plan.sampling, method, self.live.claim.worker, epoch)

    def outcome(self, done: pb.TurnDone) -> TurnOutcome:
        """Build the turn's outcome from the worker's report."""
        message: Message | None = (
            message_from_wire(done.message) if done.HasField("message") else None
        )
        own_repair = repair_from_wire(done.repair) if done.HasField("repair") else None
        repairs = self.session.repairs
        match, remembered = self.match, self.remembered
        seconds = self._time_phases(done)
        starts = self.clock.place_phases(done.phase_starts)
        return TurnOutcome(
            session=self.live.id,
            turn=self.plan.number,
            message=message,
            opening=self.request.opening,
            finish_reason=done.finish_reason,
            prompt_tokens=done.prompt_tokens,
            output_tokens=done.output_tokens,
            memory=memory_from_wire(done.memory, done.durable),
            repairs=repairs if own_repair is None else (*repairs, own_repair),
            seconds=seconds,
            phase_starts={each: round(starts[each], 6) for each in seconds if each in starts},
            fidelity=fidelity_from_wire(done),
            own_repair=own_repair,
            episode=None
            if match is None
            else episode_from_wire(match.episode, match.similarity, done),
            repairs_skipped=len(due_repairs(self.session)),
            durable=done.durable,
            stop_sequence=done.stop_sequence,
            reasoning_tokens=done.reasoning_tokens,
            deferred_tokens=done.deferred_tokens,
            recorded_tokens=done.recorded_tokens,
            prefilled_tokens=done.prefilled_tokens,
            settled_tokens=done.settled_tokens,
            shared_tokens=done.shared_pages * self.page_tokens,
            started_at=time.time() - self.clock.elapsed,
            committed_at=time.time(),
            worker=self.live.claim.worker,
            retries=self.retries,
            stop=done.state.length + len(done.state.pending),
            reselections=reselections_from_wire(done),
            prefill=prefill_from_wire(done),
            retrieval=retrieval_from_wire(done),
            remembered=remembered_from_wire(
                done, () if remembered is None else remembered.sessions
            ),
            rewrite=rewrite_from_wire(done),
            request_id=get_request_id(),
            trace_id=current_span().trace_id,
            sender=_get_sender(),
        )

    def _time_phases(self, done: pb.TurnDone) -> dict[str, float]:
        """Seconds by phase, those of the service before those of the worker."""
        seconds: dict[str, float] = {Phase.WAITING: self.waited}
        if self.match is not None:
            seconds[Phase.MATCH] = self.match.seconds
        if self.remembered is not None:
            seconds[Phase.FIND] = self.remembered.seconds
        return seconds | dict(done.seconds)


def _get_sender() -> Sender | None:
    """Return who sent the request that runs here; None outside of requests."""
    principal = get_current_principal()
    if principal is None or not principal.api:
        return None
    return Sender(principal.api, principal.key or None, principal.client or None)
