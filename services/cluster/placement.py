"""Placement of sessions on workers: weighted rendezvous hashing with bounded load. Pure.

Each worker has a score that follows from its name, a key and its slots, and the key's sessions go to
the worker with the highest score. The key of a new session is its prompt family, so that sessions
which begin with the same tokens share pages; that of others is their id. All gateways choose alike
without coordination, shares of the keys are proportional to slots, and a worker that joins or leaves
moves only its own keys.

A worker that has more than its share of the load is passed over for the one with the next score
("consistent hashing with bounded loads"), and so is one without a free slot while another has one: to
compute a family's beginning once more takes less than to wait for the end of a turn. So a hot family
spreads over as many workers as it needs.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from math import log

# A worker takes a session while its turns are at most so many times its share of all turns. With turns to
# spare beside that, as it once had, each gateway let as many more wait in a family's worker while others were idle.
_SHARE_FACTOR = 1.25


@dataclass(frozen=True)
class Candidate:
    """A worker that can take the session; `turns` are running there or queued."""

    name: str
    slots: int
    turns: int = 0

    @property
    def weight(self) -> int:
        """Its share of keys and of turns, relative to the others'."""
        return max(self.slots, 1)


def choose(key: str, candidates: Iterable[Candidate]) -> str | None:
    """Choose the name of the key's worker; None if there is no candidate.

    With equal slots the chosen one has at most 1.25 times the mean of the turns, or one where there are fewer
    turns than workers.
    """
    best = max(
        find_takers(candidates),
        key=lambda each: (score(key, each.name, each.weight), each.name),
        default=None,
    )
    return None if best is None else best.name


def find_takers(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Find the workers that take sessions: within their share and, if there are such, with a free slot."""
    known = list(candidates)
    turns = sum(each.turns for each in known)
    slots = sum(each.weight for each in known)
    # Where there are fewer turns than workers, one is no load: a second turn stays with its family.
    least = 1 if turns < len(known) else 0
    # One always is: not all can have more than their shares.
    within = [
        each
        for each in known
        if each.turns <= max(_SHARE_FACTOR * turns * each.weight / slots, least)
    ]
    return [each for each in within if each.turns < each.slots] or within


def score(key: str, name: str, weight: float) -> float:
    """Score -weight / ln(h), h in (0, 1) a hash of key and name: wins follow the weights."""
    digest = blake2b(f"{key}\0{name}".encode(), digest_size=8).digest()
    return -weight / log((int.from_bytes(digest, "big") + 0.5) / 2**64)
