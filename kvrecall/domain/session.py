"""Sessions and turns as they are committed."""

from dataclasses import dataclass

from kvrecall.domain.messages import Message
from kvrecall.domain.reports import MemoryReport, RepairReport, TurnOutcome
from kvrecall.domain.session_settings import SessionSettings
from kvrecall.domain.state_machine import SessionState
from kvrecall.domain.tool_calls import CallStatus, PendingCall


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
    def committed_state(self) -> SessionState:
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
