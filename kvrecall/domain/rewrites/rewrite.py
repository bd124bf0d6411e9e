"""A rewrite of a session's log: what the chat template says otherwise of earlier turns now."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Edit:
    """Tokens `start` .. `stop - 1` of a log become `token_ids`; none where they are dropped."""

    start: int
    stop: int
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Rewrite:
    """What a turn rewrote before it appended its own tokens.

    The session had `rows`. It went on behind the first `kept` of them, whole pages, and computed the
    tokens behind those again, with the `edits`. These are in order, and none begins before `kept`.
    """

    kept: int
    rows: int
    edits: tuple[Edit, ...]

    @property
    def dropped_tokens(self) -> int:
        """Tokens that the session has less than before."""
        return sum(each.stop - each.start - len(each.token_ids) for each in self.edits)


def follow_edits(position: int, edits: Sequence[Edit]) -> int:
    """Follow a token of a log through its edits; returns its position after them.

    A token that was replaced is at as many tokens into the replacement, or at its end.
    """
    moved = position
    for each in edits:
        if position < each.start:
            break
        inside = min(position, each.stop) - each.start
        replaced = len(each.token_ids)
        moved += (replaced if position >= each.stop else min(inside, replaced)) - inside
    return moved


def apply_edits(token_ids: Sequence[int], edits: Sequence[Edit], start: int = 0) -> list[int]:
    """Apply edits to the tokens of a log from position `start` on."""
    edited = list(token_ids)
    for each in reversed(edits):
        edited[each.start - start : each.stop - start] = each.token_ids
    return edited
