"""Sessions and turns as they are committed."""

from dataclasses import dataclass

from kvrecall.domain.messages import Message, ToolCall
from kvrecall.domain.reports import MemoryReport, RepairReport, TurnOutcome
from kvrecall.domain.sessions.state_machine import SessionState
from kvrecall.domain.settings.session import SessionSettings
from kvrecall.domain.tool_calls import CallStatus, PendingCall


@dataclass(frozen=True)
class Session:
    """A session as it was last committed.

    - `calls`: tool calls whose results are not yet appended, in call order.
    - `repairs`: those since the last turn.
    - `output_due`: tokens of the last answer until a repair has used it as its signal; 0 if it
      ended on calls.
    - `worker`: the worker that had its rows at the last takeover, whose epoch is `epoch`.
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
    worker: str = ""

    @property
    def committed_state(self) -> SessionState:
        """The state between turns: paused while tool calls are pending, else idle."""
        return SessionState.PAUSED if self.calls else SessionState.IDLE

    @property
    def outstanding(self) -> tuple[PendingCall, ...]:
        """The calls that still wait for a result."""
        return tuple(call for call in self.calls if call.status is CallStatus.PENDING)


@dataclass(frozen=True)
class Turn:
    """A committed turn: its messages, the tokens that it appended, and its outcome.

    `utterance_tokens` counts the tokens of each side in turn, the answer last; they add up to all
    of them.
    """

    session: str
    number: int
    messages: tuple[Message, ...]
    token_ids: tuple[int, ...]
    outcome: TurnOutcome
    utterance_tokens: tuple[int, ...] = ()

    @property
    def ending_calls(self) -> tuple[ToolCall, ...]:
        """The calls that the turn ended on: the model's, or recorded ones."""
        answer = self.outcome.message
        if answer is not None:
            return answer.tool_calls if self.outcome.finish_reason == "tool_calls" else ()
        return self.messages[-1].tool_calls if self.messages else ()
