"""Ids of responses and of their items, which name the turn of a session.

Nothing has to be stored to find an item again, and a request that is repeated under its idempotency
key gets the same ids.
"""

import hashlib
import re
import secrets
from dataclasses import dataclass
from typing import Literal

_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "shell_call": "sh",
    "shell_call_output": "sho",
    "local_shell_call": "lsh",
    "local_shell_call_output": "lsho",
    "apply_patch_call": "apc",
    "apply_patch_call_output": "apco",
    "tool_search_call": "tsc",
    "tool_search_output": "tso",
    "reasoning": "rs",
    "compaction": "cmp",
}
_OTHER_PREFIX = "item"
_ITEM = re.compile(
    r"[a-z]+_(?P<session>.+)_(?P<turn>[1-9]\d{0,8})(?P<attempt>(?:b[0-9a-f]{12})?)"
    r"_(?P<side>[io])(?P<number>\d{1,6})"
)
_SESSION = "s_"

Side = Literal["i", "o", "c"]
"""The items of a turn's input, of its answer, or those that a conversation got with it."""


@dataclass(frozen=True)
class TurnName:
    """Names of what belongs to turn `turn` of `session`.

    `attempt` tells responses in the background apart: one that failed is not the next one's.
    """

    session: str
    turn: int
    attempt: str = ""

    @classmethod
    def parse(cls, response: str) -> "TurnName":
        """Return the name that the id of a response was made of."""
        session, _, rest = response.removeprefix("resp_").rpartition("_")
        turn, mark, attempt = rest.partition("b")
        return cls(f"{_SESSION}{session}", int(turn), mark + attempt)

    @property
    def response(self) -> str:
        """The response that the turn gave."""
        return f"resp_{self._token}"

    def item(self, kind: str, side: Side, number: int) -> str:
        """Return the id of an item of this kind, by its place on one side of the turn."""
        return f"{_PREFIXES.get(kind, _OTHER_PREFIX)}_{self._token}_{side}{number}"

    @property
    def _token(self) -> str:
        return f"{self.session.removeprefix(_SESSION)}_{self.turn}{self.attempt}"


@dataclass(frozen=True)
class ItemPlace:
    """Where an item is: on a side of a turn."""

    name: TurnName
    side: Side
    number: int

    @classmethod
    def parse(cls, id: str) -> "ItemPlace | None":
        """Return the place that an id names; None if it names none."""
        found = _ITEM.fullmatch(id)
        if found is None:
            return None
        session = f"{_SESSION}{found['session']}"
        name = TurnName(session, int(found["turn"]), found["attempt"])
        side: Side = "i" if found["side"] == "i" else "o"
        return cls(name, side, int(found["number"]))


def name_attempt(key: str | None) -> str:
    """Return an attempt's part of names: at random, or the same for a request repeated by its key."""
    digest = hashlib.sha256(secrets.token_bytes(16) if key is None else key.encode())
    return f"b{digest.hexdigest()[:12]}"


def draw_item_id(kind: str) -> str:
    """Return a random id for an item that a client adds by itself."""
    return f"{_PREFIXES.get(kind, _OTHER_PREFIX)}_{secrets.token_hex(16)}"
