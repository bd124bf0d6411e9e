"""The check of single values: ids, numbers and texts of any record."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")
_MOST = 1 << 53
# Fields that are -1 where there is nothing, and those that have no value at a prompt's first token.
_NEGATIVE = frozenset({"label", "last_utterance"})
_UNKNOWN = frozenset({"logprob"})


def is_id(text: str) -> bool:
    """Return whether a text has the form of a session's id, which URLs and keys in Redis take."""
    return _ID.fullmatch(text) is not None


def check_values(value: Any, name: str) -> Iterator[str]:
    """Yield what is wrong in a value and whatever it contains: numbers and texts out of range."""
    field = name.rpartition(".")[2]
    if isinstance(value, str):
        if not _is_encodable(value):
            yield f"{name} has half a character, which is no text"
    elif isinstance(value, bool | None | bytes):
        return
    elif isinstance(value, int):
        if not (-1 if field in _NEGATIVE else 0) <= value < _MOST:
            yield f"{name} is {value}, and must be from 0 to 2^53"
    elif isinstance(value, float):
        if not math.isfinite(value) and field not in _UNKNOWN:
            yield f"{name} is {value}, and must be a finite number"
    elif is_dataclass(value):
        for each in fields(value):
            yield from check_values(getattr(value, each.name), f"{name}.{each.name}")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from check_values(key, f"{name}.key")
            yield from check_values(item, f"{name}.{key}")
    else:
        for item in value:
            yield from check_values(item, name)


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
