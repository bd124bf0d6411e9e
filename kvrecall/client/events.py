"""Events of streams: of a turn, and of those who watch sessions."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvrecall.client.models import TokenLogprob, ToolCall, Turn


@dataclass(frozen=True)
class TextDelta:
    """Piece of the reply's text, with its tokens' log-probabilities if they were asked for."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class ReasoningDelta:
    """Piece of what the model reasons before its reply."""

    text: str


@dataclass(frozen=True)
class ArgumentsDelta:
    """Piece of a tool call's arguments while they are generated; its ToolCallEvent follows.

    `index`: the call's number in the reply, from 0; the first piece of a call begins it.
    """

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ToolCallEvent:
    """Tool call of the reply. It can be answered once the turn is completed."""

    call: ToolCall


@dataclass(frozen=True)
class TurnCompleted:
    """Last event: the turn is committed."""

    turn: Turn


TurnEvent = ReasoningDelta | TextDelta | ArgumentsDelta | ToolCallEvent | TurnCompleted


@dataclass(frozen=True)
class WatchEvent:
    """Event of a stream: `name`, and ids and numbers. The first one is `snapshot`."""

    name: str
    data: Mapping[str, Any]

    @property
    def session(self) -> str | None:
        """Id of the session; None for the snapshot of all sessions."""
        found = self.data.get("session")
        return found if isinstance(found, str) else None
