"""Tool calls that a session waits for."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import count, takewhile

from kvrecall.domain.messages import Message, ToolCall


class CallStatus(StrEnum):
    """Status of a tool call."""

    PENDING = "pending"
    COMPLETED = "completed"
    FAILED = "failed"
    TIMED_OUT = "timed_out"


@dataclass(frozen=True)
class PendingCall:
    """A tool call, pending until a later turn appends its result.

    - `arguments`: those that the client really runs, if it reported any; `pieces`: the output so
      far, by index.
    - `batch`: number of the arrival of results within the pause, from 1 (0: no result yet); it
      makes the order of repairs the same after a crash.
    - `call_signal`: text of the last repair on the call.
    - `delta_due`, `delta_repaired`: a repair on output is due up to the one character, done up to
      the other.
    - `last_event_at`: time of the call or of its last event, in seconds since the epoch.
    - `consumed_in_turn`: the turn that appended the result.
    """

    turn: int
    position: int
    call: ToolCall
    status: CallStatus = CallStatus.PENDING
    result: str | None = None
    started: bool = False
    arguments: str = ""
    pieces: Mapping[int, str] = field(default_factory=dict)
    last_event_at: float = 0.0
    batch: int = 0
    call_signal: str = ""
    delta_due: int = 0
    delta_repaired: int = 0
    result_repaired: bool = False
    consumed_in_turn: int | None = None

    @property
    def running(self) -> ToolCall:
        """The call as the client runs it."""
        return replace(self.call, arguments=self.arguments) if self.arguments else self.call

    @property
    def partial(self) -> str:
        """The tool's output so far: the pieces up to the first missing one."""
        whole = takewhile(self.pieces.__contains__, count())
        return "".join(self.pieces[index] for index in whole)

    def result_message(self) -> Message:
        """Build the tool message of this call's result."""
        assert self.result is not None, "a call without a result has no message"
        return Message("tool", self.result, tool_call_id=self.call.id, name=self.call.name)
