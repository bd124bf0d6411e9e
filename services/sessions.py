"""What a session is: its settings, its turns, the calls it waits for, and the states it may be in. Pure values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Literal

from services.errors import IllegalTransition
from services.messages import Message, ToolCall
from services.reports import MemoryReport, RepairReport, TurnOutcome


class SessionState(StrEnum):
    """Where a session is in its turn. `idle` and `paused` are at rest; only these are ever stored."""

    IDLE = "idle"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    PAUSED = "paused"
    REPAIRING = "repairing"


class SessionEvent(StrEnum):
    """What moves a session from one state to another."""

    TURN_STARTED = "turn_started"
    TOKEN_SAID = "token_said"
    TURN_ENDED = "turn_ended"
    CALLS_MADE = "calls_made"
    REPAIR_STARTED = "repair_started"
    REPAIR_ENDED = "repair_ended"
    ROLLED_BACK_TO_IDLE = "rolled_back_to_idle"
    ROLLED_BACK_TO_PAUSE = "rolled_back_to_pause"


_STEPS = {
    (SessionState.IDLE, SessionEvent.TURN_STARTED): SessionState.PREFILLING,
    (SessionState.PAUSED, SessionEvent.TURN_STARTED): SessionState.PREFILLING,
    (SessionState.PREFILLING, SessionEvent.TOKEN_SAID): SessionState.DECODING,
    (SessionState.DECODING, SessionEvent.TOKEN_SAID): SessionState.DECODING,
    (SessionState.PREFILLING, SessionEvent.TURN_ENDED): SessionState.IDLE,
    (SessionState.DECODING, SessionEvent.TURN_ENDED): SessionState.IDLE,
    (SessionState.PREFILLING, SessionEvent.CALLS_MADE): SessionState.PAUSED,
    (SessionState.DECODING, SessionEvent.CALLS_MADE): SessionState.PAUSED,
    (SessionState.PAUSED, SessionEvent.REPAIR_STARTED): SessionState.REPAIRING,
    (SessionState.REPAIRING, SessionEvent.REPAIR_ENDED): SessionState.PAUSED,
}
_ROLLBACKS = {
    (state, event): target
    for state in SessionState
    for event, target in (
        (SessionEvent.ROLLED_BACK_TO_IDLE, SessionState.IDLE),
        (SessionEvent.ROLLED_BACK_TO_PAUSE, SessionState.PAUSED),
    )
}
TRANSITIONS: Mapping[tuple[SessionState, SessionEvent], SessionState] = MappingProxyType(_STEPS | _ROLLBACKS)


def next_state(state: SessionState, event: SessionEvent) -> SessionState:
    """The state after `event`. Raises IllegalTransition when the event cannot happen in `state`."""
    if (state, event) not in TRANSITIONS:
        raise IllegalTransition(f"a session that is {state} cannot have {event}")
    return TRANSITIONS[state, event]


class RepairTrigger(StrEnum):
    """What a repair is conditioned on: a call's arguments, tool results, or the messages of a turn."""

    TOOL_CALL = "tool_call"
    TOOL_RESULT = "tool_result"
    TURN = "turn"


DEFAULT_REPAIR_ON = frozenset({RepairTrigger.TOOL_CALL, RepairTrigger.TOOL_RESULT})


class CallStatus(StrEnum):
    """What has become of a tool call."""

    PENDING = "pending"
    COMPLETED = "completed"
    FAILED = "failed"


LayerBudgets = Literal["uniform", "pyramid", "sensitivity"]
"""How a session's budget is split over the layers."""
EpisodeCount = int | Literal["auto"]
EpisodeBuild = Literal["one_pass", "per_episode"]


@dataclass(frozen=True)
class EpisodeSettings:
    """How a session's episodes are made: segments of so many utterances, clustered into `count` episodes.

    A patched prompt takes about `medoid_utterances`. `one_pass` scores the stored rows for all episodes together;
    `per_episode` prefills the whole log once for each (EpiCache's own way). Episodes are built again when the
    conversation has grown by the share `rebuild_growth`.
    """

    count: EpisodeCount = 4
    segment_utterances: int = 4
    medoid_utterances: int = 8
    build: EpisodeBuild = "one_pass"
    rebuild_growth: float = 0.25


@dataclass(frozen=True)
class SessionSettings:
    """What is fixed when a session is created. `method_settings` and each tool are JSON texts of objects.

    Without `episodes` there are none; without `layer_budgets` the method's own way of splitting is taken.
    """

    budget: int
    repair_rows: int
    method: str
    repair_on: frozenset[RepairTrigger] = DEFAULT_REPAIR_ON
    method_settings: str = "{}"
    seed: int = 0
    tools: tuple[str, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)
    episodes: EpisodeSettings | None = None
    layer_budgets: LayerBudgets | None = None

    def repairs_on(self, trigger: RepairTrigger) -> bool:
        """Whether the session repairs on `trigger`: asked for, and with rows to promote into."""
        return self.repair_rows > 0 and trigger in self.repair_on


@dataclass(frozen=True)
class PendingCall:
    """A tool call that a turn made, until a later turn says its result.

    `batch` numbers the arrivals of results within the pause from 1 (0: no result yet): it is what makes the order
    of repairs the same after a crash. `said` is the turn that put the result into the conversation.
    """

    turn: int
    position: int
    call: ToolCall
    status: CallStatus = CallStatus.PENDING
    result: str | None = None
    started: bool = False
    partial: str = ""
    batch: int = 0
    call_repaired: bool = False
    result_repaired: bool = False
    said: int | None = None

    def result_message(self) -> Message:
        """The tool message that says this call's result."""
        assert self.result is not None, "a call without a result has no message"
        return Message("tool", self.result, tool_call_id=self.call.id, name=self.call.name)


@dataclass(frozen=True)
class Session:
    """A session as it was last committed. `calls` are those whose results are not said yet, in call order."""

    id: str
    epoch: int
    settings: SessionSettings
    created_at: float
    updated_at: float
    turns: int
    memory: MemoryReport
    calls: tuple[PendingCall, ...] = ()
    repairs: tuple[RepairReport, ...] = ()

    @property
    def resting_state(self) -> SessionState:
        """The state when nobody works on the session."""
        return SessionState.PAUSED if self.calls else SessionState.IDLE

    @property
    def outstanding(self) -> tuple[PendingCall, ...]:
        """The calls that still wait for a result."""
        return tuple(call for call in self.calls if call.status is CallStatus.PENDING)


@dataclass(frozen=True)
class Turn:
    """A committed turn: what came in, which tokens it appended to the session, what came out.

    `utterance_tokens` counts the tokens that each side said, in turns, the answer last; they add up to all of them.
    """

    session: str
    number: int
    messages: tuple[Message, ...]
    token_ids: tuple[int, ...]
    outcome: TurnOutcome
    utterance_tokens: tuple[int, ...] = ()


@dataclass(frozen=True)
class DueRepair:
    """A repair that the committed state calls for. Either `text` or `messages` is its signal."""

    trigger: RepairTrigger
    text: str = ""
    messages: tuple[Message, ...] = ()
    position: int = -1
    batch: int = 0


def due_repairs(session: Session) -> list[DueRepair]:
    """The repairs still to be run in this pause, in the one order in which they are ever run.

    First one per call, in call order; then one per arrival of results, with all results that had arrived by then.
    A function of the committed state alone, so that a restart changes nothing.
    """
    due = []
    if session.settings.repairs_on(RepairTrigger.TOOL_CALL):
        due += [
            DueRepair(RepairTrigger.TOOL_CALL, text=call.call.signal, position=call.position)
            for call in session.calls
            if not call.call_repaired
        ]
    if session.settings.repairs_on(RepairTrigger.TOOL_RESULT):
        due += [_result_repair(session, batch) for batch in _unrepaired_batches(session)]
    return due


def _unrepaired_batches(session: Session) -> list[int]:
    return sorted({call.batch for call in session.calls if call.batch and not call.result_repaired})


def _result_repair(session: Session, batch: int) -> DueRepair:
    arrived = tuple(call.result_message() for call in session.calls if 0 < call.batch <= batch)
    return DueRepair(RepairTrigger.TOOL_RESULT, messages=arrived, batch=batch)
