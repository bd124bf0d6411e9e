"""JSON text that no library writes: numbers out of range, duplicate keys, lone surrogates."""

import json
from collections.abc import Sequence
from typing import Any


class Token(str):
    """Text that stands in the JSON as it is: a number beyond every float, a thousand brackets."""

    __slots__ = ()


class Members(tuple[tuple[str, Any], ...]):
    """Members of an object in order, whose names may come twice."""

    __slots__ = ()


def encode_json(value: Any, escaped: bool = True) -> bytes:
    """Encode a value; unless `escaped`, as UTF-8, where a lone surrogate is three invalid bytes."""
    return _to_text(value, escaped).encode("utf-8", "surrogatepass")


def _to_text(value: Any, escaped: bool) -> str:
    if isinstance(value, Token):
        return str(value)
    if isinstance(value, dict):
        return _join_members(list(value.items()), escaped)
    if isinstance(value, Members):
        return _join_members(value, escaped)
    if isinstance(value, list):
        return f"[{','.join(_to_text(each, escaped) for each in value)}]"
    return json.dumps(value, ensure_ascii=escaped)


def _join_members(members: Sequence[tuple[str, Any]], escaped: bool) -> str:
    inner = (
        f"{json.dumps(name, ensure_ascii=escaped)}:{_to_text(value, escaped)}"
        for name, value in members
    )
    return "{" + ",".join(inner) + "}"
