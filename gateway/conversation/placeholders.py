"""Words for the images, sounds and files of a conversation, which no model here sees or hears.

They say the same for the same part, so a history that has it goes on in its session.
"""

import base64
import binascii
import re
from collections.abc import Iterable, Mapping
from typing import Any

Json = Mapping[str, Any]
_DATA_URL = re.compile(
    r"data:([\w.+-]+/[\w.+-]+)?((?:;[\w.+-]+=[^;,]*)*)(;base64)?,(.*)", re.DOTALL
)
_MAX_NAME = 200
_TEXT_TYPES = ("text/", "application/json")


def join_pieces(pieces: Iterable[tuple[str, bool]]) -> str:
    """Join texts; those that are words for something else (True) are lines of their own."""
    joined, after_words = "", False
    for text, words in pieces:
        if not text:
            continue
        if joined and (words or after_words):
            joined += "\n"
        joined += text
        after_words = words
    return joined


def describe(kind: str, *facts: str) -> str:
    """Return the words for a part of this kind, with what is known of it."""
    known = [fact.replace("\n", " ")[:_MAX_NAME] for fact in facts if fact]
    return f"[{', '.join([kind, *known])}: not shown, only text can be read here]"


def describe_url(kind: str, url: str, *facts: str) -> str:
    """Return the words for a part at a URL; of one with its data, the text if it is one."""
    found = _DATA_URL.fullmatch(url)
    if found is None:
        return describe(kind, *facts, url)
    media_type, _, encoded, data = found.groups()
    return describe_data(kind, media_type or "text/plain", data if encoded else "", *facts)


def describe_data(kind: str, media_type: str, data: str, *facts: str) -> str:
    """Return the words for a part with its data in base64; of a text file, its text."""
    if media_type.startswith(_TEXT_TYPES):
        text = _decode(data)
        if text is not None:
            return "\n".join([*(fact for fact in facts if fact), text])
    return describe(kind, *facts, media_type, f"{_count_bytes(data)} bytes")


def _count_bytes(data: str) -> int:
    return len(data) * 3 // 4 - data[-2:].count("=")


def _decode(data: str) -> str | None:
    try:
        return base64.b64decode(data).decode()
    except (binascii.Error, ValueError):
        return None
