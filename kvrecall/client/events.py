"""Events of a streamed turn."""

from dataclasses import dataclass

from kvrecall.client.models import ToolCall, Turn


@dataclass(frozen=True)
class TextDelta:
    """Piece of the reply's text."""

    text: str


@dataclass(frozen=True)
class ToolCallEvent:
    """Tool call of the reply. It can be answered once the turn is completed."""

    call: ToolCall


@dataclass(frozen=True)
class TurnCompleted:
    """Last event: the turn is committed."""

    turn: Turn


TurnEvent = TextDelta | ToolCallEvent | TurnCompleted
