"""The events of a streamed response, and the response that they add up to.

`response.created`, of one in the background `response.queued`, and `response.in_progress`, then for
each item of the output its events in order, then `response.completed`, `incomplete` or `failed`. Every
event has a `sequence_number`, from 0 without gaps.
"""

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from gateway.conversation.pieces import CallPiece, CallProgress
from gateway.http.errors import get_vendor_status
from gateway.openai.custom_tools import InputGrowth
from gateway.openai.errors import to_openai_error
from gateway.openai.logprobs import build_logprobs
from gateway.openai.responses import objects
from gateway.openai.responses.calls import build_call, get_kind
from gateway.openai.responses.ids import TurnName
from gateway.openai.responses.items import build_answer, build_reasoning, build_text
from gateway.openai.responses.tools import place_tools
from kvrecall.domain.events import TurnFinished, TurnStarted
from kvrecall.domain.messages import ToolCall, json_object
from kvrecall.domain.reports import TurnOutcome
from services.streams.turn import (
    ArgumentsDelta,
    ReasoningDelta,
    TextDelta,
    ToolCallEmitted,
    TurnPlanned,
    TurnProgress,
)

Json = dict[str, Any]

GROWING = frozenset({"function_call", "custom_tool_call"})
"""Types of items whose events are sent while their arguments arrive."""

_FUNCTION = "response.function_call_arguments"
_CUSTOM = "response.custom_tool_call_input"
_SHELL = "response.shell_call_command"
_Kind = Literal["message", "reasoning"]


def begin_item(item: Json) -> Json:
    """Return the item of a call as it begins."""
    begun = item | {"status": "in_progress"}
    match item["type"]:
        case "function_call":
            return begun | {"arguments": ""}
        case "custom_tool_call":
            return begun | {"input": ""}
        case "shell_call":
            return begun | {"action": item["action"] | {"commands": []}}
    return begun


class CallGrowth:
    """What tells with which text a call's item is filled, while its arguments arrive in pieces."""

    def __init__(self, item: Json) -> None:
        """Begin with the item as it begins."""
        self._kind = item["type"]
        self._id = item["id"]
        self._input = InputGrowth()

    def add(self, piece: str) -> Iterator[tuple[str, Json]]:
        """Yield the types and members of the events of a piece."""
        if self._kind == "function_call" and piece:
            yield f"{_FUNCTION}.delta", {"item_id": self._id, "delta": piece}
        elif self._kind == "custom_tool_call":
            yield from self._tell_input(self._input.add(piece))

    def end(self, item: Json) -> Iterator[tuple[str, Json]]:
        """Yield the types and members of the events that come before the item's end."""
        match item["type"]:
            case "function_call":
                members = {"name": item["name"], "arguments": item["arguments"]}
                yield f"{_FUNCTION}.done", {"item_id": self._id, **members}
            case "custom_tool_call":
                yield from self._tell_input(self._input.end(item["input"]))
                yield f"{_CUSTOM}.done", {"item_id": self._id, "input": item["input"]}
            case "shell_call":
                for index, command in enumerate(item["action"]["commands"]):
                    yield f"{_SHELL}.added", {"command_index": index, "command": ""}
                    yield f"{_SHELL}.delta", {"command_index": index, "delta": command}
                    yield f"{_SHELL}.done", {"command_index": index, "command": command}

    def _tell_input(self, text: str) -> Iterator[tuple[str, Json]]:
        if text:
            yield f"{_CUSTOM}.delta", {"item_id": self._id, "delta": text}


class ResponseEvents:
    """Encodes a turn's progress as events and puts the response together.

    White space around a text is left out, as the session has the answer without it.
    """

    def __init__(self, head: Json, name: TurnName, appended: int) -> None:
        """Begin with the response in progress, of a turn; `appended` as for `count_tokens`."""
        self.head = head
        self.name = name
        self._appended = appended
        self._toolbox = place_tools(head["tools"])
        self._output: list[Json] = []
        self._open: _Kind | None = None  # the item that is being written
        self._pieces: list[str] = []
        self._space = ""  # sent when more text follows
        self._logprobs: list[Json] = []
        self._sent_logprobs = 0  # those of them that an event has brought
        self._number = 0
        self._calls = CallProgress()
        self._closing = b""  # events that were made with the response and not sent
        self._response: Json | None = None

    def begin(self) -> bytes:
        """Encode the events before the first item."""
        events = b""
        if self.head["background"]:
            waiting = objects.queue(self.head)
            events = self._event("response.created", response=waiting)
            events += self._event("response.queued", response=waiting)
        else:
            events = self._event("response.created", response=self.head)
        return events + self._event("response.in_progress", response=self.head)

    def encode(self, progress: TurnProgress) -> bytes:
        """Encode a piece of progress."""
        match progress:
            case TurnStarted() | TurnPlanned():
                return b""
            case ReasoningDelta(text):
                return self._write("reasoning", text)
            case TextDelta(text, logprobs):
                self._logprobs += build_logprobs(logprobs)
                return self._write("message", text)
            case ArgumentsDelta() | ToolCallEmitted():
                return self._call(self._calls.add(progress))
            case TurnFinished(outcome):
                response = self.complete(outcome)
                return self._close(f"response.{response['status']}", response)

    def complete(self, outcome: TurnOutcome) -> Json:
        """Return the response as it ended; its last events may be encoded later."""
        if self._response is None:
            status = "incomplete" if outcome.finish_reason == "length" else "completed"
            self._closing = self._end_text(status)
            if all(item["type"] == "reasoning" for item in self._output):
                self._closing += self._begin_text("message") + self._end_text(status)
            self._response = objects.complete(
                self.head, self._output, outcome, self._appended, int(time.time())
            )
        return self._response

    def fail(self, problem: Mapping[str, Any]) -> bytes:
        """Encode an error, which ends the response."""
        return self._close("response.failed", self.build_failure(problem))

    def build_failure(self, problem: Mapping[str, Any]) -> Json:
        """Build the response that an error ended."""
        error = to_openai_error(problem)["error"]
        return objects.fail(self.head, self._output, error, get_vendor_status(problem))

    def _close(self, kind: str, response: Json) -> bytes:
        return self._closing + self._event(kind, response=response)

    def _write(self, kind: _Kind, piece: str) -> bytes:
        """Encode a piece of text; white space waits until something follows it."""
        text = self._space + piece
        visible = text.rstrip()
        if not visible:
            self._space = text
            return b""
        goes_on = self._open == kind
        events = b"" if goes_on else self._end_text("completed") + self._begin_text(kind)
        self._space = text[len(visible) :]
        self._pieces.append(visible)
        if kind == "reasoning":
            return events + self._part_event("reasoning_text.delta", delta=visible)
        logprobs = self._logprobs[self._sent_logprobs :]
        self._sent_logprobs = len(self._logprobs)
        return events + self._part_event("output_text.delta", delta=visible, logprobs=logprobs)

    def _begin_text(self, kind: _Kind) -> bytes:
        self._open = kind
        self._pieces = []
        build = build_answer if kind == "message" else build_reasoning
        added = self._item_event("added", build("", self._id, "in_progress") | {"content": []})
        if kind == "reasoning":
            return added
        return added + self._part_event("content_part.added", part=build_text(""))

    def _end_text(self, status: str) -> bytes:
        """End the item that is being written."""
        self._space = ""
        if self._open is None:
            return b""
        text = "".join(self._pieces)
        if self._open == "reasoning":
            item = build_reasoning(text, self._id, status)
            events = self._part_event("reasoning_text.done", text=text)
        else:
            item = build_answer(text, self._id, status, self._logprobs)
            events = self._part_event("output_text.done", text=text, logprobs=self._logprobs)
            events += self._part_event("content_part.done", part=item["content"][0])
            self._logprobs = []
            self._sent_logprobs = 0
        self._open = None
        return events + self._end_item(item)

    def _call(self, piece: CallPiece) -> bytes:
        """Encode a piece of a call; one whose item does not grow is sent when it is whole."""
        call = ToolCall(piece.id, piece.name, piece.whole or "")
        kind = get_kind(call, self._toolbox)
        whole = piece.whole is not None
        if kind not in GROWING and not whole:
            return b""
        begins = piece.begins or kind not in GROWING
        events = self._end_text("completed") if begins else b""
        cut = whole and json_object(call.arguments) is None
        id = self.name.item(kind, "o", len(self._output))
        item = build_call(call, self._toolbox, id, "incomplete" if cut else "completed")
        if begins:
            events += self._item_event("added", begin_item(item))
            self._growth = CallGrowth(item)
        grown = [*self._growth.add(piece.arguments), *(self._growth.end(item) if whole else ())]
        for type, members in grown:
            events += self._event(type, output_index=len(self._output), **members)
        return events + self._end_item(item) if whole else events

    def _end_item(self, item: Json) -> bytes:
        done = self._item_event("done", item)
        self._output.append(item)
        return done

    @property
    def _id(self) -> str:
        """The id of the item that is being written."""
        assert self._open is not None, "text is written within an item"
        return self.name.item(self._open, "o", len(self._output))

    def _item_event(self, what: str, item: Json) -> bytes:
        index = len(self._output)
        return self._event(f"response.output_item.{what}", output_index=index, item=item)

    def _part_event(self, what: str, **members: object) -> bytes:
        """Encode an event of the one part of the item that is being written."""
        place = {"item_id": self._id, "output_index": len(self._output), "content_index": 0}
        return self._event(f"response.{what}", **place, **members)

    def _event(self, kind: str, **members: object) -> bytes:
        self._number += 1
        return encode_event(kind, self._number - 1, **members)


def encode_event(kind: str, number: int, **members: object) -> bytes:
    """Encode an event by its kind and its number in the stream."""
    data = {"type": kind, "sequence_number": number, **members}
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n".encode()
