"""Tool calls that a session waits for."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import count, takewhile

from kvrecall.domain.messages import Message, ToolCall


class CallStatus(StrEnum):
    """What has become of a tool call."""

    PENDING = "pending"
    COMPLETED = "completed"
    FAILED = "failed"
    TIMED_OUT = "timed_out"


@dataclass(frozen=True)
class PendingCall:
    """A tool call that a turn made, until a later turn says its result.

    `arguments` is what the client really runs, where it told so; `pieces` is the tool's output so far, by index.
    `batch` numbers the arrivals of results within the pause from 1 (0: no result yet): it is what makes the order
    of repairs the same after a crash. `call_signal` is the text of the last repair on the call; a repair on output is
    due up to character `delta_due`, and was done up to `delta_repaired`. `last_event_at` is when the
    call was made or last reported on, in seconds since the epoch. `consumed_in_turn` is the
    turn that put the result into the conversation.
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
        """The tool's output so far: the pieces from the first one up to the first that is missing."""
        whole = takewhile(self.pieces.__contains__, count())
        return "".join(self.pieces[index] for index in whole)

    def result_message(self) -> Message:
        """The tool message that says this call's result."""
        assert self.result is not None, "a call without a result has no message"
        return Message("tool", self.result, tool_call_id=self.call.id, name=self.call.name)
