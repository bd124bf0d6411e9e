"""Calls as a tokenizer's own `response_template` has them."""

import json
from collections.abc import Sequence
from typing import Any

from transformers.utils.chat_parsing import parse_response

from workers.model.calls.sink import CallSink
from workers.model.calls.source import CallSource, Malformed, Reading


def read_template_region(
    source: CallSource,
    sink: CallSink,
    tools: Sequence[Any],
    mark: str,
    close: str,
    template: dict[str, Any],
) -> Reading[None]:
    """Read a region of a tokenizer's own `response_template` up to its end, where it is parsed."""
    pieces: list[str] = []
    yield from source.read_until((close,), pieces.append)
    region = f"{mark}{''.join(pieces)}{close}"
    source.take(len(close))
    try:
        message = parse_response(region, template, prefix="", tools=list(tools) or None)
        found = [_to_call(call.get("function", call)) for call in message["tool_calls"]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Malformed from error
    if not found:
        raise Malformed
    for name, arguments in found:
        sink.begin(name)
        sink.add(arguments)
        sink.end()


def _to_call(value: Any) -> tuple[str, str]:
    """Return a call's name and arguments. Raises KeyError, TypeError and ValueError."""
    name, arguments = value["name"], value.get("arguments", {})
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise TypeError("a call has a name and an object of arguments")
    return name, json.dumps(arguments, ensure_ascii=False, allow_nan=False)
