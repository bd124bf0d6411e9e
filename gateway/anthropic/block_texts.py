"""Content blocks of Anthropic's messages as text: what they say, or words for what they show.

`TREATMENTS` has a row for each type of block in Anthropic's schemas but calls and results.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from gateway.conversation.ignored import Tolerance
from gateway.conversation.placeholders import describe, describe_data, describe_url
from kvrecall.domain.errors import InvalidRequest

Json = Mapping[str, Any]
Treatment = Literal["read", "replaced", "unread", "left out"]
TREATMENTS: Mapping[str, Treatment] = {
    "text": "read",
    "search_result": "read",
    "compaction": "read",
    "tool_reference": "read",
    "image": "replaced",
    "document": "replaced",
    "container_upload": "replaced",
    "browser_state": "replaced",
    "server_tool_use": "replaced",
    "mcp_tool_use": "replaced",
    "web_search_tool_result": "replaced",
    "web_fetch_tool_result": "replaced",
    "code_execution_tool_result": "replaced",
    "bash_code_execution_tool_result": "replaced",
    "text_editor_code_execution_tool_result": "replaced",
    "tool_search_tool_result": "replaced",
    "advisor_tool_result": "replaced",
    "mcp_tool_result": "replaced",
    # The session has the reasoning as it was said, so what a client repeats of it is not read.
    "thinking": "unread",
    "redacted_thinking": "unread",
    "fallback": "unread",
    "tool_addition": "left out",
    "tool_removal": "left out",
    "mcp_tool_listing": "left out",
}
# Members of hosted tools' results that people can read; others are ids and encrypted.
_READABLE = frozenset(
    {"title", "url", "source", "text", "stdout", "stderr", "error_code", "tool_name", "data"}
)


def read_block(block: Json, field: str, tolerance: Tolerance) -> tuple[str, bool]:
    """Return the text of a block, and whether it is words for something else.

    Raises InvalidRequest for a block without its members, and where the operator wants it for one
    that is no text.
    """
    kind = str(block["type"])
    match TREATMENTS[kind]:
        case "read":
            return _read(kind, block, field), False
        case "replaced":
            words = _replace(kind, block)
            return tolerance.replace(field, kind, words), True
        case "left out":
            return tolerance.replace(field, kind, ""), False
        case "unread":
            return "", False


def _read(kind: str, block: Json, field: str) -> str:
    if kind == "text":
        return _require_text(block, "text", field)
    if kind == "compaction":
        return _get(block, "content")
    if kind == "tool_reference":
        return f"[tool {_get(block, 'tool_name')}]"
    return "\n".join(_collect(block))


def _replace(kind: str, block: Json) -> str:
    if kind in ("image", "document"):
        return _describe_source(kind, block)
    if kind in ("server_tool_use", "mcp_tool_use"):
        given = json.dumps(block.get("input") or {}, sort_keys=True)
        return f"[called the hosted tool {_get(block, 'name')}: {given}]"
    if kind.endswith("_tool_result"):
        texts = "\n".join(_collect(block.get("content")))
        return f"[result of a hosted tool]\n{texts}"
    return describe(kind.replace("_", " "), _get(block, "file_id"))


def _describe_source(kind: str, block: Json) -> str:
    """Return the words for an image or a document; of a document in text, the text."""
    source = block.get("source")
    if not isinstance(source, dict):
        return describe(kind)
    facts = (_get(block, "title"), _get(block, "context"))
    media_type = _get(source, "media_type")
    match source.get("type"):
        case "text":
            return "\n".join([*filter(None, facts), _get(source, "data")])
        case "content":
            return "\n".join([*filter(None, facts), *_collect(source.get("content"))])
        case "base64":
            return describe_data(kind, media_type or "unknown", _get(source, "data"), *facts)
        case "url":
            return describe_url(kind, _get(source, "url"), *facts)
    return describe(kind, *facts, media_type, _get(source, "file_id"))


def _collect(value: Any) -> Iterator[str]:
    """Yield the readable texts of a result, in order."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from _collect(each)
    elif isinstance(value, dict):
        for name, each in value.items():
            if isinstance(each, dict | list) or (name in _READABLE and isinstance(each, str)):
                yield from _collect(each)


def _require_text(block: Json, member: str, field: str) -> str:
    text = block.get(member)
    if not isinstance(text, str):
        raise InvalidRequest(f"{field}.{member}", "Input should be a valid string")
    return text


def _get(block: Json, name: str) -> str:
    value = block.get(name)
    return value if isinstance(value, str) else ""
