"""The session API's server-sent events of a turn."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from gateway.rest.schemas.messages import to_tool_call
from gateway.rest.schemas.public import PublicValue, to_dict, to_json
from gateway.rest.schemas.turns import to_logprobs, to_turn
from kvrecall.domain.events import TurnFinished, TurnStarted
from services.streams.turn import (
    ArgumentsDelta,
    ReasoningDelta,
    TextDelta,
    ToolCallEmitted,
    TurnPlanned,
    TurnProgress,
)


class SessionEvents:
    """The session API's events: reasoning, token, arguments_delta, tool_call, last `done` or `error`."""

    def begin(self) -> bytes:
        """Encode nothing."""
        return b""

    def encode(self, progress: TurnProgress) -> bytes:
        """Encode a piece of progress; nothing for the turn's start."""
        match progress:
            case TurnStarted() | TurnPlanned():
                return b""
            case ReasoningDelta(text):
                return _encode("reasoning", {"text": text})
            case TextDelta(text, logprobs):
                found = [to_dict(each) for each in to_logprobs(logprobs)]
                return _encode("token", {"text": text, **({"logprobs": found} if found else {})})
            case ArgumentsDelta():
                return _encode("arguments_delta", asdict(progress))
            case ToolCallEmitted(call):
                return _encode("tool_call", to_tool_call(call))
            case TurnFinished(outcome):
                return _encode("done", to_turn(outcome))

    def fail(self, problem: Mapping[str, Any]) -> bytes:
        """Encode an error."""
        return _encode("error", dict(problem))


def _encode(event: str, data: PublicValue | dict[str, Any]) -> bytes:
    text = json.dumps(data).encode() if isinstance(data, dict) else to_json(data)
    return f"event: {event}\ndata: ".encode() + text + b"\n\n"
