"""Ids of calls, in the forms that chat templates take."""

import re
from collections.abc import Sequence
from enum import StrEnum
from hashlib import blake2b
from typing import Any

ChatMessage = dict[str, Any]

_WRITTEN = re.compile(r"functions\..+:\d+")
_NUMBERED = re.compile(r"call_\d+_\d+_(\d+)")


class CallIds(StrEnum):
    """A form of ids.

    - `ANY`: any text.
    - `SHORT`: nine letters and digits (Mistral).
    - `NUMBERED`: `functions.name:0`, with a number that goes on over all calls (Kimi).
    """

    ANY = "any"
    SHORT = "short"
    NUMBERED = "numbered"


def name_call(answer_start: int, index: int, number: str = "") -> str:
    """Return an id that is unique in its session, and the same whenever the turn is run again.

    number: the one that the model gave the call; its result is rendered with it again.
    """
    return "_".join(("call", str(answer_start), str(index), *filter(None, (number,))))


def write_ids(messages: Sequence[ChatMessage], form: CallIds) -> list[ChatMessage]:
    """Write the ids of calls, and of the calls that results belong to, in a template's form."""
    if form is CallIds.ANY:
        return list(messages)
    ids: dict[str, str] = {}
    written = []
    for message in messages:
        rendered = dict(message)
        if calls := message.get("tool_calls"):
            for index, call in enumerate(calls):
                ids[call["id"]] = _write(call["id"], call["function"]["name"], index, form)
            rendered["tool_calls"] = [{**call, "id": ids[call["id"]]} for call in calls]
        if id := message.get("tool_call_id"):
            name = message.get("name") or "unknown"
            rendered["tool_call_id"] = ids.get(id) or _write(id, name, 0, form)
        written.append(rendered)
    return written


def _write(id: str, name: str, index: int, form: CallIds) -> str:
    """Write the id of the call at `index` in its message."""
    if form is CallIds.SHORT:
        short = len(id) == 9 and id.isalnum()
        return id if short else blake2b(id.encode(), digest_size=5).hexdigest()[:9]
    if _WRITTEN.fullmatch(id):
        return id
    numbered = _NUMBERED.fullmatch(id)
    return f"functions.{name}:{numbered[1] if numbered else index}"
