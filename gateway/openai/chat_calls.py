"""Calls of an answer as chat completions write them: of functions, custom tools, or `function_call`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.conversation.pieces import CallPiece, CallProgress
from gateway.openai.custom_tools import InputGrowth, read_input
from kvrecall.domain.messages import ToolCall
from services.streams.turn import ArgumentsDelta, ToolCallEmitted

Json = dict[str, Any]


@dataclass(frozen=True)
class CallForm:
    """How the calls of a request's answers are written.

    `custom`: the names of custom tools; `single`: an answer has one call, as `function_call`.
    """

    custom: frozenset[str] = frozenset()
    single: bool = False

    def build(self, calls: Sequence[ToolCall]) -> Json:
        """Build the member of a message with its calls; there is none without calls."""
        if not calls:
            return {}
        if self.single:
            return {"function_call": _build_function(calls[0].name, calls[0].arguments)}
        return {"tool_calls": [self._build(call) for call in calls]}

    def begin(self, piece: CallPiece) -> Json:
        """Build the delta that begins a call."""
        if self.single:
            return {"function_call": _build_function(piece.name, "")}
        call = self._build(ToolCall(piece.id, piece.name, ""))
        return {"tool_calls": [{"index": piece.index, **call}]}

    def add(self, piece: CallPiece, text: str) -> Json:
        """Build the delta that adds a text to a call."""
        if self.single:
            return {"function_call": {"arguments": text}}
        custom = piece.name in self.custom
        added = {"custom": {"input": text}} if custom else {"function": {"arguments": text}}
        return {"tool_calls": [{"index": piece.index, **added}]}

    def get_finish(self, reason: str) -> str:
        """Return why an answer ended."""
        return "function_call" if self.single and reason == "tool_calls" else reason

    def _build(self, call: ToolCall) -> Json:
        if call.name not in self.custom:
            function = _build_function(call.name, call.arguments)
            return {"id": call.id, "type": "function", "function": function}
        text = read_input(call.arguments)
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": text}}


class CallDeltas:
    """The deltas of the calls of one streamed answer."""

    def __init__(self, form: CallForm) -> None:
        self._form = form
        self._calls = CallProgress()
        self._input = InputGrowth()

    def add(self, progress: ArgumentsDelta | ToolCallEmitted) -> Iterator[Json]:
        """Yield the deltas of a piece of progress."""
        piece = self._calls.add(progress)
        if self._form.single and piece.index:
            return
        if piece.begins:
            self._input = InputGrowth()
            yield self._form.begin(piece)
        text = self._read_input(piece) if piece.name in self._form.custom else piece.arguments
        if text:
            yield self._form.add(piece, text)

    def _read_input(self, piece: CallPiece) -> str:
        if piece.whole is None:
            return self._input.add(piece.arguments)
        return self._input.end(read_input(piece.whole))


def _build_function(name: str, arguments: str) -> Json:
    return {"name": name, "arguments": arguments}
