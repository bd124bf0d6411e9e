"""Parsers of server-sent events: of any, and of a turn."""

import json
from collections.abc import Mapping
from typing import Any

from kvrecall.client._parsing import parse
from kvrecall.client.events import (
    ArgumentsDelta,
    ReasoningDelta,
    TextDelta,
    ToolCallEvent,
    TurnCompleted,
    TurnEvent,
)
from kvrecall.client.exceptions import InvalidResponse, build_problem
from kvrecall.client.models import TokenLogprob, ToolCall, Turn


class LineParser:
    """Incremental parser: lines in, names and data of events out. Comments are skipped."""

    def __init__(self) -> None:
        self._event = ""
        self._data: list[str] = []

    def feed(self, line: str) -> tuple[str, Mapping[str, Any]] | None:
        """Parse one line without its end; return the event that it completes, if any.

        Raises ServiceProblem for an `error` event, InvalidResponse for data that is not JSON.
        """
        if line == "":
            return self._finish_event()
        name, _, value = line.partition(":")
        if name == "event":
            self._event = value.removeprefix(" ")
        elif name == "data":
            self._data.append(value.removeprefix(" "))
        return None

    def _finish_event(self) -> tuple[str, Mapping[str, Any]] | None:
        event, text = self._event, "\n".join(self._data)
        self._event = ""
        self._data = []
        if not text:
            return None
        data = _decode(text)
        if event == "error":
            raise build_problem(int(data.get("status", 500)), data, "the request failed")
        return event, data


class EventParser:
    """Incremental parser of a turn's events. Unknown events are skipped."""

    def __init__(self) -> None:
        self._lines = LineParser()

    def feed(self, line: str) -> TurnEvent | None:
        """Parse one line without its end; return the event that it completes, if any.

        Raises as `LineParser.feed`.
        """
        event = self._lines.feed(line)
        return None if event is None else _to_event(*event)


def _decode(text: str) -> Mapping[str, Any]:
    try:
        data = json.loads(text)
    except ValueError as error:
        raise InvalidResponse(f"expected JSON in an event, got {text:.80}") from error
    if not isinstance(data, dict):
        raise InvalidResponse(f"expected a JSON object in an event, got {text:.80}")
    return data


def _to_event(event: str, data: Mapping[str, Any]) -> TurnEvent | None:
    match event:
        case "token":
            logprobs = tuple(parse(TokenLogprob, each) for each in data.get("logprobs", ()))
            return TextDelta(str(data.get("text", "")), logprobs)
        case "reasoning":
            return ReasoningDelta(str(data.get("text", "")))
        case "arguments_delta":
            return parse(ArgumentsDelta, data)
        case "tool_call":
            return ToolCallEvent(parse(ToolCall, data))
        case "done":
            return TurnCompleted(parse(Turn, data))
        case _:
            return None
