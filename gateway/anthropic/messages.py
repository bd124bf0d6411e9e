"""Anthropic's messages as clients read them: one object, or a stream of events.

A message's id names the place of the reply: a thread goes on from it without a table of messages.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json

from gateway.anthropic.errors import to_anthropic_error
from gateway.conversation.answers import Json
from gateway.conversation.pieces import CallPiece, CallProgress
from kvrecall.domain.events import TurnFinished, TurnStarted
from kvrecall.domain.reports import TurnOutcome
from services.conversations.continuation import Continuation, ReplyPlace
from services.streams.turn import (
    ArgumentsDelta,
    ReasoningDelta,
    TextDelta,
    ToolCallEmitted,
    TurnPlanned,
    TurnProgress,
)
from services.usage import build_receipt, count_tokens

_ID = re.compile(r"msg_([0-9A-Za-z]{1,64})_([1-9][0-9]{0,8})_([0-9a-f]{64})", re.ASCII)
_STOP_REASONS: Mapping[str, str] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}
# Members of a block beside its text. Nothing is signed: the session holds the text.
_SIGNED: Mapping[str, Json] = {"text": {}, "thinking": {"signature": ""}}


def format_message_id(place: ReplyPlace) -> str:
    """Build the id of the message at a place."""
    return f"msg_{place.session.removeprefix('s_')}_{place.turn}_{place.asked.hex()}"


def parse_message_id(text: str) -> ReplyPlace | None:
    """Return the place that an id of `format_message_id` names; None for any other text."""
    found = _ID.fullmatch(text)
    if found is None:
        return None
    session, turn, asked = found.groups()
    return ReplyPlace(f"s_{session}", int(turn), bytes.fromhex(asked))


def build_message(model: str, marked: bool, outcome: TurnOutcome, found: Continuation) -> Json:
    """Build the object of a whole answer. `marked`: the request marked what to cache."""
    message = outcome.generated
    content: list[Json] = []
    if message is not None and message.reasoning:
        content.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
    if message is not None and message.content:
        content.append({"type": "text", "text": message.content})
    for call in () if message is None else message.tool_calls:
        content.append(_build_block(call.id, call.name, _read_input(call.arguments)))
    return {
        **_head(model, found),
        "content": content,
        **_end(outcome),
        "usage": build_usage(outcome, found, marked),
    }


def build_usage(outcome: TurnOutcome, found: Continuation, marked: bool) -> Json:
    """Build the token counts: those computed now and those read from the session, of the whole.

    Every row is kept, so of a request that marked what to cache all that is new counts as written.
    """
    counts = count_tokens(outcome, found.appended_tokens)
    return {
        "input_tokens": 0 if marked else counts.written,
        "cache_creation_input_tokens": counts.written if marked else 0,
        "cache_read_input_tokens": counts.cached,
        "output_tokens": counts.output,
        "output_tokens_details": {"thinking_tokens": outcome.reasoning_tokens},
        "kvrecall": build_receipt(outcome),
    }


class MessageEvents:
    """The events of a streamed answer, from `message_start` to `message_stop`, or `error`."""

    def __init__(self, model: str, marked: bool, begun: bool, found: Continuation) -> None:
        """Begin with the head of the message.

        begun: the client began the answer, so that white space at its end is part of it. Otherwise
        a text has none there, as in the session.
        """
        self._begun = begun
        self._space = ""  # sent when more text follows
        self._model = model
        self._marked = marked
        self._found = found
        self._index = 0
        self._open = ""  # the type of the block that goes on
        self._calls = CallProgress()

    def begin(self) -> bytes:
        """Encode the message without content; its whole counts follow with its end."""
        planned, appended = self._found.planned, self._found.appended_tokens
        new = 0 if planned is None else planned.prompt_tokens + appended
        held = self._found.held_tokens if planned is None else planned.held_tokens - appended
        usage = {
            "input_tokens": 0 if self._marked else new,
            "cache_creation_input_tokens": new if self._marked else 0,
            "cache_read_input_tokens": held,
            "output_tokens": 0,
        }
        message = {**_head(self._model, self._found), "content": [], "usage": usage}
        message |= {"stop_reason": None, "stop_sequence": None}
        return _encode("message_start", message=message) + PING

    def encode(self, progress: TurnProgress) -> bytes:
        """Encode a piece of progress."""
        match progress:
            case TurnStarted() | TurnPlanned():
                return b""
            case ReasoningDelta(text):
                return self._piece("thinking", text)
            case TextDelta(text):
                return self._piece("text", text)
            case ArgumentsDelta() | ToolCallEmitted():
                return self._call(self._calls.add(progress))
            case TurnFinished(outcome):
                return self._end(outcome)

    def fail(self, problem: Mapping[str, Any]) -> bytes:
        """Encode an error."""
        members = to_anthropic_error(problem)
        return _encode(**members)

    def _piece(self, kind: str, text: str) -> bytes:
        """Encode a piece of text; of a whole answer, white space waits until something follows it."""
        text = self._space + text
        visible = text if self._begun else text.rstrip()
        if not visible:
            self._space = text
            return b""
        events = b""
        if self._open != kind:
            events = self._stop_piece() + self._start({"type": kind, kind: "", **_SIGNED[kind]})
            self._open = kind
        self._space = text[len(visible) :]
        return events + self._delta({"type": f"{kind}_delta", kind: visible})

    def _call(self, piece: CallPiece) -> bytes:
        events = b""
        if piece.begins:
            events = self._stop_piece() + self._start(_build_block(piece.id, piece.name, {}))
            events += self._delta({"type": "input_json_delta", "partial_json": ""})
        if piece.arguments:
            delta = {"type": "input_json_delta", "partial_json": piece.arguments}
            events += self._delta(delta)
        return events if piece.whole is None else events + self._stop()

    def _end(self, outcome: TurnOutcome) -> bytes:
        usage = build_usage(outcome, self._found, self._marked)
        events = self._stop_piece() + _encode("message_delta", delta=_end(outcome), usage=usage)
        return events + _encode("message_stop")

    def _start(self, block: Json) -> bytes:
        return _encode("content_block_start", index=self._index, content_block=block)

    def _delta(self, delta: Json) -> bytes:
        return _encode("content_block_delta", index=self._index, delta=delta)

    def _stop_piece(self) -> bytes:
        events = b""
        if self._open == "thinking":
            events = self._delta({"type": "signature_delta", "signature": ""})
        if self._open:
            events += self._stop()
        self._open = ""
        self._space = ""
        return events

    def _stop(self) -> bytes:
        event = _encode("content_block_stop", index=self._index)
        self._index += 1
        return event


def _head(model: str, found: Continuation) -> Json:
    id = format_message_id(found.place)
    return {"id": id, "type": "message", "role": "assistant", "model": model}


def _end(outcome: TurnOutcome) -> Json:
    reason = _STOP_REASONS.get(outcome.finish_reason, "end_turn")
    if outcome.stop_sequence and reason == "end_turn":
        reason = "stop_sequence"
    stop = outcome.stop_sequence if reason == "stop_sequence" else None
    return {"stop_reason": reason, "stop_sequence": stop}


def _build_block(id: str, name: str, input: Json) -> Json:
    return {"type": "tool_use", "id": id, "name": name, "input": input}


def _read_input(arguments: str) -> Json:
    """Read the arguments of a call; those of one that was cut off as far as they go."""
    try:
        input = from_json(arguments, allow_partial=True)
    except ValueError:
        return {}
    return input if isinstance(input, dict) else {}


def _encode(type: str, **members: Any) -> bytes:
    return f"event: {type}\ndata: {json.dumps({'type': type, **members})}\n\n".encode()


PING = _encode("ping")
"""What is sent while there are no events."""
