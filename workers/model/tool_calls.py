"""Tool calls in a model's output, in Hermes format: `<tool_call>{json}</tool_call>`."""

import json
from dataclasses import dataclass
from typing import Any

TOOL_CALL_OPEN = "<tool_call>"
TOOL_CALL_CLOSE = "</tool_call>"


@dataclass(frozen=True)
class ParsedCall:
    """A tool call in the model's output; `arguments` is the JSON text of an object."""

    name: str
    arguments: str


def parse_tool_calls(text: str) -> tuple[str, list[ParsedCall]]:
    """Split an answer into its text and its tool calls.

    Calls that are not well formed stay in the text, visible to the client.
    """
    calls: list[ParsedCall] = []
    plain: list[str] = []
    at = 0
    while (opening := text.find(TOOL_CALL_OPEN, at)) >= 0:
        call, end = _parse_call(text, opening)
        plain.append(text[at : opening if call else end])
        calls += [call] if call else []
        at = end
    return "".join([*plain, text[at:]]).strip(), calls


def _parse_call(text: str, opening: int) -> tuple[ParsedCall | None, int]:
    """Parse the call whose tag starts at `opening`; returns it and its end.

    Returns None and the end of the tag if the call is not well formed.
    """
    start = opening + len(TOOL_CALL_OPEN)
    start_of_json = start + len(text[start:]) - len(text[start:].lstrip())
    try:
        value, end_of_json = json.JSONDecoder().raw_decode(text, start_of_json)
    except (json.JSONDecodeError, RecursionError):
        return None, start
    rest = text[end_of_json:].lstrip()
    call = _to_call(value)
    if call is None or not rest.startswith(TOOL_CALL_CLOSE):
        return None, start
    return call, len(text) - len(rest) + len(TOOL_CALL_CLOSE)


def _to_call(value: Any) -> ParsedCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    return ParsedCall(value["name"], json.dumps(arguments, ensure_ascii=False))
