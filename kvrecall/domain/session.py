"""What a session is: its settings, its turns, the calls it waits for, and the states it may be in. Pure values."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import count, takewhile
from types import MappingProxyType
from typing import Literal

from kvrecall.domain.errors import IllegalTransition
from kvrecall.domain.messages import Message, ToolCall
from kvrecall.domain.reports import MemoryReport, RepairReport, TurnOutcome


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
    REPAIR_ENDED_IN_IDLE = "repair_ended_in_idle"
    REPAIR_ENDED_IN_PAUSE = "repair_ended_in_pause"
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
    (SessionState.IDLE, SessionEvent.REPAIR_STARTED): SessionState.REPAIRING,
    (SessionState.PAUSED, SessionEvent.REPAIR_STARTED): SessionState.REPAIRING,
    (SessionState.REPAIRING, SessionEvent.REPAIR_ENDED_IN_IDLE): SessionState.IDLE,
    (SessionState.REPAIRING, SessionEvent.REPAIR_ENDED_IN_PAUSE): SessionState.PAUSED,
}
_ROLLBACKS = {
    (state, event): target
    for state in SessionState
    for event, target in (
        (SessionEvent.ROLLED_BACK_TO_IDLE, SessionState.IDLE),
        (SessionEvent.ROLLED_BACK_TO_PAUSE, SessionState.PAUSED),
    )
}
TRANSITIONS: Mapping[tuple[SessionState, SessionEvent], SessionState] = MappingProxyType(
    _STEPS | _ROLLBACKS
)


def next_state(state: SessionState, event: SessionEvent) -> SessionState:
    """The state after `event`. Raises IllegalTransition when the event cannot happen in `state`."""
    if (state, event) not in TRANSITIONS:
        raise IllegalTransition(f"a session that is {state} cannot have {event}")
    return TRANSITIONS[state, event]


class RepairTrigger(StrEnum):
    """What a repair is conditioned on: its signal.

    A call's name and arguments, a tool's output so far, tool results, the answer that was said last, or the messages
    of a turn, before they are prefilled.
    """

    TOOL_CALL = "tool_call"
    TOOL_DELTA = "tool_delta"
    TOOL_RESULT = "tool_result"
    LAST_OUTPUT = "last_output"
    TURN = "turn"


DEFAULT_REPAIR_ON = frozenset(
    {RepairTrigger.TOOL_CALL, RepairTrigger.TOOL_DELTA, RepairTrigger.TOOL_RESULT}
)


class CallStatus(StrEnum):
    """What has become of a tool call."""

    PENDING = "pending"
    COMPLETED = "completed"
    FAILED = "failed"
    TIMED_OUT = "timed_out"


LayerBudgets = Literal["uniform", "pyramid", "sensitivity"]
"""How a session's budget is split over the layers."""
RepairScan = Literal["exact", "bounded", "summary"]
"""How a repair finds its candidates among the evicted rows."""
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
class ForkOrigin:
    """Where a session began: at the end of turn `turn` of `session`, which may be gone since."""

    session: str
    turn: int


@dataclass(frozen=True)
class SessionSettings:
    """What is fixed when a session is created. `method_settings`, `repair_settings` and each tool are JSON objects.

    Without `episodes` there are none; without `layer_budgets` the method's own way of splitting is taken, without
    `repair_scan` the worker's. `repair_seconds` is the most that one repair may take; None: as long as it needs.
    `tenant` is whose session it is: rows are shared, and counted, within a tenant. `forked_from` is set for a fork.
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
    repair_scan: RepairScan | None = None
    repair_settings: str = "{}"
    repair_seconds: float | None = None
    tenant: str = ""
    forked_from: ForkOrigin | None = None

    def repairs_on(self, trigger: RepairTrigger) -> bool:
        """Whether the session repairs on `trigger`: asked for, and with rows to promote into."""
        return self.repair_rows > 0 and trigger in self.repair_on


@dataclass(frozen=True)
class PendingCall:
    """A tool call that a turn made, until a later turn says its result.

    `arguments` is what the client really runs, where it told so; `pieces` is the tool's output so far, by index.
    `batch` numbers the arrivals of results within the pause from 1 (0: no result yet): it is what makes the order
    of repairs the same after a crash. `call_signal` is the text of the last repair on the call; a repair on output is
    due up to character `delta_due`, and was done up to `delta_repaired`. `heard_at` is when the call was made or last
    reported on, in seconds since the epoch. `said` is the turn that put the result into the conversation.
    """

    turn: int
    position: int
    call: ToolCall
    status: CallStatus = CallStatus.PENDING
    result: str | None = None
    started: bool = False
    arguments: str = ""
    pieces: Mapping[int, str] = field(default_factory=dict)
    heard_at: float = 0.0
    batch: int = 0
    call_signal: str = ""
    delta_due: int = 0
    delta_repaired: int = 0
    result_repaired: bool = False
    said: int | None = None

    @property
    def running(self) -> ToolCall:
        """The call as the client runs it."""
        return replace(self.call, arguments=self.arguments) if self.arguments else self.call

    @property
    def partial(self) -> str:
        """The tool's output so far: the pieces from the first one up to the first that is missing."""
        whole = takewhile(self.pieces.__contains__, count())
        return "".join(self.pieces[index] for index in whole)

    def result_message(self) -> Message:
        """The tool message that says this call's result."""
        assert self.result is not None, "a call without a result has no message"
        return Message("tool", self.result, tool_call_id=self.call.id, name=self.call.name)


@dataclass(frozen=True)
class SharedPages:
    """The pages of a session before index `pages` are those that `owner` wrote, but for what an entry before covers."""

    owner: str
    pages: int


@dataclass(frozen=True)
class Session:
    """A session as it was last committed. `calls` are those whose results are not said yet, in call order.

    `repairs` are those since the last turn. `output_due` counts the tokens of the last answer, until a repair has
    used it as its signal; none if the answer ended on calls. `shared` are the pages of others that it begins with.
    `worker` had its rows when somebody took it over last, as `epoch` is that one's.
    """

    id: str
    epoch: int
    settings: SessionSettings
    created_at: float
    updated_at: float
    turns: int
    memory: MemoryReport
    calls: tuple[PendingCall, ...] = ()
    repairs: tuple[RepairReport, ...] = ()
    output_due: int = 0
    shared: tuple[SharedPages, ...] = ()
    worker: str = ""

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
    """A repair that the committed state calls for.

    Its signal is `text`, or `messages`, or the last `output` tokens that the last turn said. `reach` is how many
    characters of the tool's output a repair on it takes account of.
    """

    trigger: RepairTrigger
    text: str = ""
    messages: tuple[Message, ...] = ()
    position: int = -1
    batch: int = 0
    reach: int = 0
    output: int = 0


SIGNAL_CHARACTERS = 16_384
"""The end of a tool's output that a repair is conditioned on: a worker observes no more than its last tokens."""


def due_repairs(session: Session) -> list[DueRepair]:
    """The repairs still to be run before the next turn, in the one order in which they are ever run.

    First one per call, in call order; then one per tool whose output has grown and whose result is not there yet;
    then one per arrival of results, with all results that had arrived by then. In a session that waits for no tool,
    one on its own last answer. A function of the committed state alone, so that a restart changes nothing.
    """
    due = {
        RepairTrigger.TOOL_CALL: [
            _call_repair(call) for call in session.calls if _call_is_new(call)
        ],
        RepairTrigger.TOOL_DELTA: [
            _delta_repair(call) for call in session.calls if _output_has_grown(call)
        ],
        RepairTrigger.TOOL_RESULT: [
            _result_repair(session, batch) for batch in _unrepaired_batches(session)
        ],
        RepairTrigger.LAST_OUTPUT: _output_repairs(session),
    }
    return [
        repair
        for trigger, found in due.items()
        if session.settings.repairs_on(trigger)
        for repair in found
    ]


def _call_is_new(call: PendingCall) -> bool:
    return call.call_signal != call.running.signal


def _call_repair(call: PendingCall) -> DueRepair:
    return DueRepair(RepairTrigger.TOOL_CALL, text=call.running.signal, position=call.position)


def _output_has_grown(call: PendingCall) -> bool:
    return call.result is None and call.delta_due > call.delta_repaired


def _delta_repair(call: PendingCall) -> DueRepair:
    text = call.partial[: call.delta_due][-SIGNAL_CHARACTERS:]
    return DueRepair(
        RepairTrigger.TOOL_DELTA, text=text, position=call.position, reach=call.delta_due
    )


def _unrepaired_batches(session: Session) -> list[int]:
    return sorted({call.batch for call in session.calls if call.batch and not call.result_repaired})


def _result_repair(session: Session, batch: int) -> DueRepair:
    arrived = tuple(call.result_message() for call in session.calls if 0 < call.batch <= batch)
    return DueRepair(RepairTrigger.TOOL_RESULT, messages=arrived, batch=batch)


def _output_repairs(session: Session) -> list[DueRepair]:
    due = session.output_due and not session.calls
    return [DueRepair(RepairTrigger.LAST_OUTPUT, output=session.output_due)] if due else []
