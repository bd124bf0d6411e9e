"""Damaged histories, mended so that a conversation goes on.

Clients repeat what other servers, cut streams and lost tools have left in a history. Each rule reads
the history alone, so the same one becomes the same messages, and a request finds the session that an
earlier one has made of it.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from pydantic_core import from_json

from kvrecall.domain.messages import Message, ToolCall, json_object
from kvrecall.domain.tolerance.ignored import Ignored
from kvrecall.domain.tolerance.surrogates import replace_in_json, replace_in_text

_MAX_ID = 256
_NO_RESULT = "(no result: this call was not answered)"
_STRAY = "(result of a tool call that is not in this conversation)\n"


@dataclass(frozen=True)
class Placed:
    """A message, and its number in the request; negative: it is not of the request."""

    index: int
    message: Message


@dataclass(frozen=True)
class Mended:
    """Messages in the order in which a session has them, and what was replaced in them."""

    messages: tuple[Message, ...]
    ignored: tuple[Ignored, ...]


def mend_messages(messages: Sequence[Message]) -> Mended:
    """Mend each message by itself: its text, and the ids and arguments of its calls."""
    mended: list[Message] = []
    ignored: list[Ignored] = []
    for index, message in enumerate(messages):
        content = replace_in_text(message.content)
        if content != message.content:
            ignored.append(Ignored(f"messages[{index}].content", "surrogates"))
        calls = []
        for position, call in enumerate(message.tool_calls):
            arguments, fault = _mend_arguments(call.arguments)
            if fault:
                field = f"messages[{index}].tool_calls[{position}].arguments"
                ignored.append(Ignored(field, fault))
            calls.append(ToolCall(_shorten(call.id), call.name, arguments))
        calls = _tell_apart(index, calls, ignored)
        result = _shorten(message.tool_call_id)
        mended.append(
            replace(message, content=content, tool_calls=tuple(calls), tool_call_id=result)
        )
    return Mended(tuple(mended), tuple(ignored))


def mend_order(messages: Sequence[Placed], asked: Sequence[ToolCall]) -> Mended:
    """Give each call one result behind its message: its own, or a word that there is none.

    `asked`: calls of the message before. A result counts up to the next answer; one without a call
    becomes a user's text. The calls of a message get different ids.
    """
    ordered: list[Message] = []
    ignored: list[Ignored] = []
    calls = tuple(asked)
    place = messages[0].index if messages else 0
    waiting: list[Placed] = []
    for placed in messages:
        if placed.message.role != "assistant":
            waiting.append(placed)
            continue
        ordered += _answer(calls, place, waiting, ignored)
        place, waiting = placed.index, []
        calls = tuple(_tell_apart(place, placed.message.tool_calls, ignored))
        ordered.append(replace(placed.message, tool_calls=calls))
    ordered += _answer(calls, place, waiting, ignored)
    known = [each for each in ignored if not each.field.startswith("messages[-")]
    return Mended(tuple(ordered), tuple(known))


def _answer(
    calls: Sequence[ToolCall], place: int, messages: Sequence[Placed], ignored: list[Ignored]
) -> Iterator[Message]:
    """Yield the results of calls in their order, then the other messages."""
    results = [each for each in messages if each.message.role == "tool"]
    for call in calls:
        result = _take_result(call, results)
        if result is None:
            ignored.append(Ignored(f"messages[{place}]", "call without result"))
        content = _NO_RESULT if result is None else result.message.content
        yield Message("tool", content, tool_call_id=call.id)
    for each in messages:
        if each.message.role != "tool":
            yield each.message
        elif any(each is stray for stray in results):
            ignored.append(Ignored(f"messages[{each.index}]", "result without call"))
            yield Message("user", _STRAY + each.message.content)


def _take_result(call: ToolCall, results: list[Placed]) -> Placed | None:
    """Remove the call's result from `results`: by its id, or without one by the function's name."""
    for number, each in enumerate(results):
        id, name = each.message.tool_call_id, each.message.name
        named = id == call.id or call.id.startswith(f"{id}#") if id else name in ("", call.name)
        if named:
            return results.pop(number)
    return None


def _tell_apart(index: int, calls: Sequence[ToolCall], ignored: list[Ignored]) -> list[ToolCall]:
    """Return the calls of message `index`, each with an id of its own."""
    known: set[str] = set()
    named = []
    for position, call in enumerate(calls):
        id = call.id
        if not id or id in known:
            field = f"messages[{index}].tool_calls[{position}].id"
            ignored.append(Ignored(field, "duplicate" if id else "empty"))
            id = f"{id or 'call'}#{position}"
        known.add(id)
        named.append(replace(call, id=id))
    return named


def _mend_arguments(text: str) -> tuple[str, str]:
    """Return arguments that are the JSON text of an object, and what was wrong with them."""
    if json_object(text) is None:
        return json.dumps(_read_start(text)), "no JSON object"
    clean = replace_in_json(text)
    return clean, "" if clean == text else "surrogates"


def _read_start(text: str) -> dict[str, Any]:
    """Return what can be read of an object that was cut."""
    try:
        value = from_json(replace_in_json(text), allow_partial="trailing-strings")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _shorten(id: str) -> str:
    """Return an id of a length that a catalog takes, the same one every time."""
    if len(id) <= _MAX_ID:
        return replace_in_text(id)
    return f"call_{blake2b(id.encode(errors='replace'), digest_size=16).hexdigest()}"
