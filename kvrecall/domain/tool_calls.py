"""Tool calls that a session waits for."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
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
class ToolOutput:
    """A tool's output so far, in numbers: the pieces themselves are the catalog's.

    - `pieces`: number of pieces; `size`: their UTF-8 bytes, at least one each.
    - `next_index`: the index after the highest one; `joined`: number of pieces before the first
      missing one.
    - `recent_characters`, `recent_bytes`: size of the joined pieces from character `delta_due` of
      the call on.
    - `first_event_at`: time of the tool's first event, in seconds since the epoch; 0: none yet.
    """

    pieces: int = 0
    size: int = 0
    next_index: int = 0
    joined: int = 0
    recent_characters: int = 0
    recent_bytes: int = 0
    first_event_at: float = 0.0


def summarize_pieces(pieces: Mapping[int, str], delta_due: int) -> ToolOutput:
    """Return the numbers of an output, of which a repair was due up to character `delta_due`."""
    joined = list(takewhile(pieces.__contains__, count()))
    recent = "".join(pieces[index] for index in joined)[delta_due:]
    return ToolOutput(
        pieces=len(pieces),
        size=sum(max(1, len(text.encode())) for text in pieces.values()),
        next_index=1 + max(pieces, default=-1),
        joined=len(joined),
        recent_characters=len(recent),
        recent_bytes=len(recent.encode()),
    )


@dataclass(frozen=True)
class PendingCall:
    """A tool call, pending until a later turn appends its result.

    - `arguments`: those that the client really runs, if it reported any; `output`: what the tool
      has put out so far.
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
    output: ToolOutput = ToolOutput()
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

    def stamped(self, at: float) -> "PendingCall":
        """Return the call with the time of an event, in seconds since the epoch."""
        output = replace(self.output, first_event_at=self.output.first_event_at or at)
        return replace(self, output=output, last_event_at=at)

    def result_message(self) -> Message:
        """Build the tool message of this call's result."""
        assert self.result is not None, "a call without a result has no message"
        return Message("tool", self.result, tool_call_id=self.call.id, name=self.call.name)
