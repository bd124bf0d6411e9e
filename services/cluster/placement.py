"""Which worker a new session goes to: weighted rendezvous hashing. Pure.

Each worker has a score that follows from its name, the session's id and its weight; the highest has the session. So
every gateway chooses alike without asking, shares are as the weights are, and a worker that comes or goes moves no
session but its own.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from math import log

_SPARE_WEIGHT = 0.5
"""Of a worker without a free slot: its idle sessions give theirs up."""


@dataclass(frozen=True)
class Candidate:
    """A worker that may have the session."""

    name: str
    free_slots: int

    @property
    def weight(self) -> float:
        """Its share of new sessions, beside the others'."""
        return max(self.free_slots, 0) + _SPARE_WEIGHT


def chosen(session: str, candidates: Iterable[Candidate]) -> str | None:
    """The name of the worker that is to have the session; None when there is no candidate."""
    best = max(
        candidates,
        key=lambda each: (score(session, each.name, each.weight), each.name),
        default=None,
    )
    return None if best is None else best.name


def score(session: str, name: str, weight: float) -> float:
    """-weight / ln(h), with h in (0, 1) from session and name: the greatest of several wins in proportion to weight."""
    digest = blake2b(f"{session}\0{name}".encode(), digest_size=8).digest()
    return -weight / log((int.from_bytes(digest, "big") + 0.5) / 2**64)
