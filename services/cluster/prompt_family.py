"""The prompt family of a session: what it begins with, by which its worker is chosen. Pure."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from hashlib import blake2b
from itertools import takewhile

from kvrecall.domain.messages import Message
from kvrecall.domain.settings.session import SessionSettings


def prompt_family(settings: SessionSettings, messages: Sequence[Message]) -> str:
    """Digest what sessions that may share their first pages have in common, as 32 hex digits.

    `messages` are those of the first turn. Empty without tools and leading system messages. The
    model is the same in all workers that a session may go to, and settings that say which rows are
    shared in the end (`services.pages.prefix_sharing`) matter little here: a family that is too large
    spreads by its load. OpenAI's `prompt_cache_key` is left out: agents send the id of their
    conversation in it, of which each would be a family of its own.

    Sessions that remember each other are one family: their worker has the pages that they bring back.
    """
    if settings.memory:
        return _digest({"memory": settings.memory})
    leading = tuple(takewhile(lambda message: message.role == "system", messages))
    if not (leading or settings.tools):
        return ""
    shapes = {
        "tenant": settings.tenant,
        "cache_salt": settings.cache_salt,
        "tools": settings.tools,
        "leading": [asdict(message) for message in leading],
    }
    return _digest(shapes)


def _digest(shapes: Mapping[str, object]) -> str:
    text = json.dumps(shapes, sort_keys=True, separators=(",", ":"))
    return blake2b(text.encode(), digest_size=16).hexdigest()
