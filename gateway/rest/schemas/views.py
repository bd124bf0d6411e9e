"""What goes out over HTTP: plain JSON views of the domain's values."""

import json
from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from gateway.rest.schemas.repairs import RepairTotalsView, RepairView
from kvrecall.domain.messages import Message, ToolCall
from kvrecall.domain.reports import MemoryReport, TurnOutcome
from kvrecall.domain.session import Session
from kvrecall.domain.session_settings import EpisodeSettings, ForkOrigin
from kvrecall.domain.state_machine import SessionState
from kvrecall.domain.tool_calls import PendingCall
from kvrecall.domain.tool_events import EventReceipt
from services.catalog.records import EpisodeSet


class View(BaseModel):
    """A response body. `model_validate` makes one of a domain value with the same fields."""

    model_config = ConfigDict(frozen=True, from_attributes=True)


class FunctionView(View):
    """The function of a tool call."""

    name: str
    arguments: str


class ToolCallView(View):
    """A tool call, as in the OpenAI API."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionView

    @classmethod
    def of(cls, call: ToolCall) -> "ToolCallView":
        """The view of a tool call."""
        return cls(id=call.id, function=FunctionView(name=call.name, arguments=call.arguments))


class AssistantMessageView(View):
    """The assistant's message, as in the OpenAI API."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    tool_calls: list[ToolCallView] | None = None

    @classmethod
    def of(cls, message: Message) -> "AssistantMessageView":
        """The view of a message."""
        calls = [ToolCallView.of(call) for call in message.tool_calls]
        return cls(content=message.content or (None if calls else ""), tool_calls=calls or None)


class PendingCallView(View):
    """A tool call whose result is not yet said in the conversation."""

    id: str
    name: str
    arguments: str
    status: str

    @classmethod
    def of(cls, call: PendingCall) -> "PendingCallView":
        """The view of a pending call."""
        return cls(
            id=call.call.id,
            name=call.call.name,
            arguments=call.call.arguments,
            status=call.status.value,
        )


class EpisodeSettingsView(View):
    """How a session's episodes are made."""

    count: int | Literal["auto"]
    segment_utterances: int
    medoid_utterances: int
    build: str
    rebuild_growth: float


class ForkOriginView(View):
    """The session, and its turn, at whose end another began."""

    session: str
    turn: int


class SessionView(View):
    """A session: its settings, and where it stands."""

    id: str
    state: str
    model: str
    worker: str
    budget: int
    repair_rows: int
    repair_on: list[str]
    repair_scan: str | None
    repair_settings: dict[str, Any]
    repair_seconds: float | None
    method: str
    method_settings: dict[str, Any]
    layer_budgets: str | None
    episodes: EpisodeSettingsView | None
    seed: int
    tools: list[dict[str, Any]]
    metadata: dict[str, str]
    forked_from: ForkOriginView | None
    turns: int
    length: int
    pending_calls: list[PendingCallView]
    created_at: datetime
    updated_at: datetime

    @classmethod
    def of(cls, session: Session, state: SessionState, model: str) -> "SessionView":
        """The view of a session."""
        settings = session.settings
        return cls(
            id=session.id,
            state=state.value,
            model=model,
            worker=session.worker,
            budget=settings.budget,
            repair_rows=settings.repair_rows,
            repair_on=sorted(trigger.value for trigger in settings.repair_on),
            repair_scan=settings.repair_scan,
            repair_settings=json.loads(settings.repair_settings),
            repair_seconds=settings.repair_seconds,
            method=settings.method,
            method_settings=json.loads(settings.method_settings),
            layer_budgets=settings.layer_budgets,
            episodes=_episode_settings(settings.episodes),
            seed=settings.seed,
            tools=[json.loads(tool) for tool in settings.tools],
            metadata=dict(settings.metadata),
            forked_from=_origin(settings.forked_from),
            turns=session.turns,
            length=session.memory.length,
            pending_calls=[PendingCallView.of(call) for call in session.calls],
            created_at=datetime.fromtimestamp(session.created_at, UTC),
            updated_at=datetime.fromtimestamp(session.updated_at, UTC),
        )


class SessionPageView(View):
    """Some sessions, newest first; `next_cursor` asks for the rest."""

    sessions: list[SessionView]
    next_cursor: str | None


class TurnMemoryView(View):
    """What the session holds after a turn; active, peak and bound rows are those of the largest layer."""

    length: int
    budget: int
    active_rows: int
    peak_rows: int
    bound_rows: int
    active_bytes: int
    evicted_rows: int
    promoted_rows: int
    tier_bytes: dict[str, int]
    repair: RepairTotalsView
    repairs: list[RepairView]

    @classmethod
    def of(cls, outcome: TurnOutcome) -> "TurnMemoryView":
        """The view of a turn's memory, with the repairs since the turn before."""
        return cls(
            **_counts(outcome.memory),
            repair=RepairTotalsView.of(outcome.repairs, outcome.repairs_skipped),
            repairs=[RepairView.model_validate(repair) for repair in outcome.repairs],
        )


class MemoryView(View):
    """What a session holds now."""

    session: str
    length: int
    budget: int
    active_rows: int
    peak_rows: int
    bound_rows: int
    active_bytes: int
    evicted_rows: int
    promoted_rows: int
    tier_bytes: dict[str, int]
    layer_active_rows: list[int]
    layer_peak_rows: list[int]
    layer_bound_rows: list[int]
    in_slot: bool

    @classmethod
    def of(cls, session: str, memory: MemoryReport) -> "MemoryView":
        """The view of a report."""
        return cls(
            **_counts(memory),
            session=session,
            layer_active_rows=list(memory.layer_active_rows),
            layer_peak_rows=list(memory.layer_peak_rows),
            layer_bound_rows=list(memory.layer_bound_rows),
            in_slot=memory.in_slot,
        )


def _counts(memory: MemoryReport) -> dict[str, Any]:
    return {
        name: getattr(memory, name)
        for name in TurnMemoryView.model_fields
        if name not in ("repair", "repairs")
    }


class EpisodeView(View):
    """An episode: how much was said in it, the segment in its middle, and how many turns were about it."""

    id: str
    active: bool
    segments: int
    tokens: int
    medoid: str
    matched: int


class EpisodesView(View):
    """A session's episodes as they were built last, with what was said since assigned to them.

    Of `segments` embedded so far, `built_segments` were there at the last of `builds`. `settings` is null when the
    session has no episodes.
    """

    session: str
    settings: EpisodeSettingsView | None
    segments: int
    built_segments: int
    builds: int
    episodes: list[EpisodeView]

    @classmethod
    def of(cls, session: Session, found: EpisodeSet) -> "EpisodesView":
        """The view of a session's episodes."""
        return cls(
            session=session.id,
            settings=_episode_settings(session.settings.episodes),
            segments=found.segments,
            built_segments=found.built_segments,
            builds=found.builds,
            episodes=[
                EpisodeView(
                    id=each.id,
                    active=each.id == found.active,
                    segments=each.segments,
                    tokens=each.tokens,
                    medoid=each.medoid,
                    matched=each.matched,
                )
                for each in found.episodes
            ],
        )


def _episode_settings(settings: EpisodeSettings | None) -> EpisodeSettingsView | None:
    return None if settings is None else EpisodeSettingsView.model_validate(settings)


def _origin(origin: ForkOrigin | None) -> ForkOriginView | None:
    return None if origin is None else ForkOriginView.model_validate(origin)


class UsageView(View):
    """Tokens of a turn."""

    prompt_tokens: int
    output_tokens: int


class FidelityView(View):
    """Divergence from the session that was compared with: mean KL in nats, share of equal top tokens."""

    tokens: int
    kl_mean: float
    top1_agreement: float


class TurnEpisodeView(View):
    """The episode that a turn was about, and what making it active moved: nothing if it was active already.

    Rows are counted over all layers and KV heads; `similarity` is the cosine of the turn's text to the episode.
    """

    episode: str
    similarity: float
    switched: bool
    rows_moved: int
    rows_kept: int
    bytes_moved: int
    seconds: float


class TurnView(View):
    """A committed turn. `durable`: the session's rows survive their worker; they can be computed again in any case."""

    session: str
    turn: int
    message: AssistantMessageView | None
    finish_reason: str
    usage: UsageView
    memory: TurnMemoryView
    seconds: dict[str, float]
    fidelity: FidelityView | None = None
    episode: TurnEpisodeView | None = None
    durable: bool

    @classmethod
    def of(cls, outcome: TurnOutcome) -> "TurnView":
        """The view of a turn."""
        return cls(
            session=outcome.session,
            turn=outcome.turn,
            message=None if outcome.message is None else AssistantMessageView.of(outcome.message),
            finish_reason=outcome.finish_reason,
            usage=UsageView(
                prompt_tokens=outcome.prompt_tokens, output_tokens=outcome.output_tokens
            ),
            memory=TurnMemoryView.of(outcome),
            seconds=dict(outcome.seconds),
            fidelity=None
            if outcome.fidelity is None
            else FidelityView.model_validate(outcome.fidelity),
            episode=None
            if outcome.episode is None
            else TurnEpisodeView.model_validate(outcome.episode),
            durable=outcome.durable,
        )


class EventView(View):
    """The durable acknowledgement of an event; `outstanding` calls still wait for a result.

    A `late` event found nothing to change: the call has its result already.
    """

    session: str
    call_id: str
    type: str
    status: str
    state: str
    outstanding: list[str]
    late: bool

    @classmethod
    def of(cls, receipt: EventReceipt) -> "EventView":
        """The view of a receipt."""
        return cls(**vars(receipt) | {"outstanding": list(receipt.outstanding)})
