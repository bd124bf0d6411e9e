"""Strict validation by the types of the vendors' own clients, which these read leniently."""

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

Json = dict[str, Any]
# Members beyond the vendors' types: what the session holds, and reasoning as other servers name it.
OURS = frozenset({"kvrecall", "reasoning", "reasoning_content"})
# Members that the vendors' services send, or earlier versions of their types require: `name` of a
# function's arguments that are done, `status` of a custom tool's call, and `custom` of one in pieces.
THEIRS = re.compile(
    r"(\.response)?\.store|\.name|\.logprobs\[\d+\](\.top_logprobs\[\d+\])?\.bytes"
    r"|((\.response)?\.output\[\d+\]|\.item)\.status"
    r"|\.choices\[0\]\.delta\.tool_calls\[0\]\.custom"
)
# Values that the vendors' services send and their types leave out: the code of an overflow, which
# clients look for; null for the end of a text that goes on, and for the first token of a prompt;
# the type of a custom tool's call in pieces.
WIDER = re.compile(
    r"response\.error\.code 'context_length_exceeded'"
    r"|choices\.\d+\.finish_reason None"
    r"|choices\.\d+\.logprobs\.(token_logprobs|top_logprobs)\.0 None"
    r"|choices\.0\.delta\.tool_calls\.0\.type 'custom'"
)


def check(kind: Any, value: Any) -> Any:
    """Validate decoded JSON and return it as the vendor's type.

    Raises ValidationError for a member that is missing or of another type or literal, and
    AssertionError for one that the type does not have.
    """
    try:
        found = _adapt(kind).validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        if not all(map(_is_wider, error.errors())):
            raise
        found = kind.construct(**value)
    places = set(_find_unknown(found, "")) - OURS
    unknown = sorted(place for place in places if not THEIRS.fullmatch(place))
    assert not unknown, f"the vendor's type has no {', '.join(unknown)}"
    return found


@cache
def _adapt(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _is_wider(error: Any) -> bool:
    place = ".".join(map(str, error["loc"]))
    return WIDER.fullmatch(f"{place} {error['input']!r}") is not None


def _find_unknown(value: Any, place: str) -> Iterator[str]:
    """Yield the places of members that no type has; ours by their names."""
    if isinstance(value, BaseModel):
        for name in value.model_extra or {}:
            yield name if name in OURS else f"{place}.{name}"
        for name in type(value).model_fields:
            yield from _find_unknown(getattr(value, name), f"{place}.{name}")
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from _find_unknown(each, f"{place}.{name}")
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from _find_unknown(each, f"{place}[{index}]")


def read_events(text: str) -> list[tuple[str, Json]]:
    """Read a stream's events: their names, empty where they have none, and their data."""
    events = []
    for block in text.split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        fields = dict(line.split(": ", 1) for line in lines)
        if "data" in fields and fields["data"] != "[DONE]":
            events.append((fields.get("event", ""), json.loads(fields["data"])))
    return events
