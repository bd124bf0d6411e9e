"""Parsing of tool calls in a model's text, one function per form.

Each takes the text, the place behind the mark that opens a call, and the tools, and returns the
calls that it found there with the place behind them; none if what follows is not well formed.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers.utils.chat_parsing import parse_response


@dataclass(frozen=True)
class ParsedCall:
    """A tool call in the model's output; `arguments` is the JSON text of an object."""

    name: str
    arguments: str


Found = tuple[list[ParsedCall], int]
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)</function>\s*</tool_call>", re.DOTALL)
_PARAMETER = re.compile(
    r"\s*<parameter=([^>\n]+)>\n?(.*?)(?:\n?</parameter>|(?=<parameter=)|\Z)\s*", re.DOTALL
)
_ARGS_NAME = re.compile(r"([\w.:-]+)\s*(?:\[CALL_ID\]\w*)?\[ARGS\]")


def parse_hermes(text: str, start: int, tools: Sequence[Any]) -> Found:
    """Parse `{"name": .., "arguments": {..}}</tool_call>`."""
    value, end = _read_json(text, start)
    call = _to_call(value, ("arguments",))
    closing = _skip(text, end, "</tool_call>")
    return ([], start) if call is None or closing is None else ([call], closing)


def parse_qwen_xml(text: str, start: int, tools: Sequence[Any]) -> Found:
    """Parse `<function=name><parameter=key>value</parameter>..</function></tool_call>`.

    A value is text if the tool's schema says so, else JSON where it can be read as such.
    """
    function = _FUNCTION.match(text, start)
    if function is None:
        return [], start
    name, body = function.group(1).strip(), function.group(2)
    arguments: dict[str, Any] = {}
    at = 0
    while at < len(body):
        parameter = _PARAMETER.match(body, at)
        if parameter is None:
            return ([], start) if body[at:].strip() else _one(name, arguments, function.end())
        key = parameter.group(1).strip()
        arguments[key] = _read_value(parameter.group(2), get_property(tools, name, key))
        at = parameter.end()
    return _one(name, arguments, function.end())


def parse_llama(text: str, start: int, tools: Sequence[Any]) -> Found:
    """Parse `{"name": .., "parameters": {..}}`, several of them with a semicolon between."""
    calls: list[ParsedCall] = []
    at = start
    while True:
        value, end = _read_json(text, at)
        call = _to_call(value, ("parameters", "arguments"))
        if call is None or not set(value) <= {"type", "name", "parameters", "arguments"}:
            return (calls, at) if calls else ([], start)
        calls.append(call)
        following = _skip(text, end, ";")
        if following is None:
            return calls, end
        at = following


def parse_mistral(text: str, start: int, tools: Sequence[Any]) -> Found:
    """Parse `[{"name": .., "arguments": {..}}, ..]`."""
    values, end = _read_json(text, start)
    if not isinstance(values, list):
        return [], start
    calls = [_to_call(value, ("arguments",)) for value in values]
    found = [call for call in calls if call is not None]
    return (found, end) if len(found) == len(calls) else ([], start)


def parse_mistral_args(text: str, start: int, tools: Sequence[Any]) -> Found:
    """Parse `name[ARGS]{..}`, or the older array."""
    name = _ARGS_NAME.match(text, start)
    if name is None:
        return parse_mistral(text, start, tools)
    value, end = _read_json(text, name.end())
    return _one(name.group(1), value, end) if isinstance(value, dict) else ([], start)


def parse_template_region(
    text: str, start: int, tools: Sequence[Any], mark: str, close: str, template: dict[str, Any]
) -> Found:
    """Parse a region of a tokenizer's own `response_template`, up to its end."""
    closing = text.find(close, start)
    if closing < 0:
        return [], start
    end = closing + len(close)
    try:
        message = parse_response(
            f"{mark}{text[start:end]}", template, prefix="", tools=list(tools) or None
        )
        calls = [
            _to_call(call.get("function", call), ("arguments",)) for call in message["tool_calls"]
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return [], start
    found = [call for call in calls if call is not None]
    return (found, end) if found and len(found) == len(calls) else ([], start)


def get_parameters(tools: Sequence[Any], name: str) -> dict[str, Any]:
    """Return the schema of a tool's parameters; an empty one if there is none."""
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, dict) else {}
        if function.get("name") == name and isinstance(function.get("parameters"), dict):
            parameters: dict[str, Any] = function["parameters"]
            return parameters
    return {}


def get_property(tools: Sequence[Any], name: str, key: str) -> dict[str, Any]:
    """Return the schema of one parameter of a tool; an empty one if there is none."""
    properties = get_parameters(tools, name).get("properties")
    found = properties.get(key) if isinstance(properties, dict) else None
    return found if isinstance(found, dict) else {}


def is_text(schema: dict[str, Any]) -> bool:
    """Return whether a parameter's value is written as it is: text that is not one of a choice."""
    return schema.get("type") == "string"


def _read_value(text: str, schema: dict[str, Any]) -> Any:
    if is_text(schema):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _read_json(text: str, start: int) -> tuple[Any, int]:
    """Read the JSON value at `start`, after white space; None if there is none."""
    at = start + len(text[start:]) - len(text[start:].lstrip())
    try:
        return json.JSONDecoder().raw_decode(text, at)
    except (json.JSONDecodeError, RecursionError):
        return None, start


def _skip(text: str, at: int, expected: str) -> int | None:
    """Return the place behind `expected`, which may follow white space; None if it does not."""
    rest = text[at:].lstrip()
    return len(text) - len(rest) + len(expected) if rest.startswith(expected) else None


def _to_call(value: Any, members: Sequence[str]) -> ParsedCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    given = [value[member] for member in members if member in value]
    arguments = given[0] if given else {}
    if not isinstance(arguments, dict):
        return None
    return ParsedCall(value["name"], json.dumps(arguments, ensure_ascii=False))


def _one(name: str, arguments: dict[str, Any], end: int) -> Found:
    return [ParsedCall(name, json.dumps(arguments, ensure_ascii=False))], end
