"""Placement of new sessions on workers: weighted rendezvous hashing. Pure.

Each worker has a score that follows from its name, the session's id and its weight; the highest
score gets the session. All gateways choose alike without coordination, shares are proportional to
weights, and a worker that joins or leaves moves only its own sessions.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from math import log

# Weight of a worker without a free slot: it can swap idle sessions out.
_SPARE_WEIGHT = 0.5


@dataclass(frozen=True)
class Candidate:
    """A worker that can take the session."""

    name: str
    free_slots: int

    @property
    def weight(self) -> float:
        """Its share of new sessions, relative to the others'."""
        return max(self.free_slots, 0) + _SPARE_WEIGHT


def choose(session: str, candidates: Iterable[Candidate]) -> str | None:
    """The name of the session's worker; None if there is no candidate."""
    best = max(
        candidates,
        key=lambda each: (score(session, each.name, each.weight), each.name),
        default=None,
    )
    return None if best is None else best.name


def score(session: str, name: str, weight: float) -> float:
    """Score -weight / ln(h), h in (0, 1) a hash of session and name: wins follow the weights."""
    digest = blake2b(f"{session}\0{name}".encode(), digest_size=8).digest()
    return -weight / log((int.from_bytes(digest, "big") + 0.5) / 2**64)
