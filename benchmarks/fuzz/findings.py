"""Findings of a run, each with the request that shows it, and counts of replies by door and status."""

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from benchmarks.fuzz.requests import Request

# Texts of a finding are cut to so many characters; a request is kept whole.
SHOWN = 600


@dataclass(frozen=True)
class Problem:
    """Something wrong with a reply: its kind, which tells findings apart, and what was seen."""

    kind: str
    seen: str


@dataclass(frozen=True)
class Finding:
    """A problem, and the request after which it was seen; `request` is None where no request caused it."""

    door: str
    problem: Problem
    request: Request | None
    times: int = 1

    @property
    def size(self) -> int:
        """Bytes of the request: the smallest one is kept."""
        return 0 if self.request is None else len(self.request.body) + len(self.request.path)

    def describe(self) -> dict[str, Any]:
        """Return it as JSON values."""
        sent = None if self.request is None else self.request.describe()
        return {
            "door": self.door,
            "kind": self.problem.kind,
            "times": self.times,
            "seen": self.problem.seen[:SHOWN],
            "request": sent,
        }


@dataclass
class Findings:
    """The smallest request of every kind of finding, and the replies by door and status.

    Safe for several threads.
    """

    replies: Counter[tuple[str, str]] = field(default_factory=Counter)
    other: Counter[str] = field(default_factory=Counter)
    _found: dict[tuple[str, str], Finding] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, door: str, status: str) -> None:
        """Count a reply."""
        with self._lock:
            self.replies[door, status] += 1

    def count_other(self, name: str, number: int = 1) -> None:
        """Count anything else."""
        with self._lock:
            self.other[name] += number

    def add(self, door: str, problem: Problem, request: Request | None = None) -> None:
        """Add a finding; of one kind at one door the smallest request is kept."""
        found = Finding(door, problem, request)
        with self._lock:
            known = self._found.get((door, problem.kind))
            if known is None:
                self._found[door, problem.kind] = found
                return
            smallest = min(known, found, key=lambda each: each.size)
            self._found[door, problem.kind] = Finding(
                door, smallest.problem, smallest.request, known.times + 1
            )

    def times(self, door: str, kind: str) -> int:
        """Return how often a kind was found at a door."""
        with self._lock:
            known = self._found.get((door, kind))
            return 0 if known is None else known.times

    def __iter__(self) -> Iterator[Finding]:
        with self._lock:
            return iter(
                sorted(self._found.values(), key=lambda each: (each.door, each.problem.kind))
            )

    @property
    def requests(self) -> int:
        """Number of all requests that were sent."""
        return self.replies.total()
