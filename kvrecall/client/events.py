"""Events of a streamed turn."""

from dataclasses import dataclass

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
class ToolCallEvent:
    """Tool call of the reply. It can be answered once the turn is completed."""

    call: ToolCall


@dataclass(frozen=True)
class TurnCompleted:
    """Last event: the turn is committed."""

    turn: Turn


TurnEvent = ReasoningDelta | TextDelta | ToolCallEvent | TurnCompleted
