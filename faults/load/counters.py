"""Counts of clients: acknowledged writes, retries, server errors, and slow requests."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock

from kvrecall.client import KvrecallError

# Server errors that a client may see while something is broken: each says "try again".
ALLOWED_ERRORS = frozenset(
    {
        "shutting_down",
        "worker_lost",
        "session_not_open",
        "storage_failed",
        "rows_missing",  # more pages were damaged while some were computed again
        "cancelled",
        "catalog_error",
        "storage_full",  # the catalog's disk is full
        "changed_meanwhile",
        "turn_quarantined",  # two faults in a row hit the workers that ran the turn
    }
)
# Requests that took longer are kept with their times.
SLOW_SECONDS = 5.0


@dataclass(frozen=True)
class Attempt:
    """A request to the gateway at `url`: its monotonic time, duration in seconds, and outcome."""

    url: str
    start: float
    seconds: float
    outcome: str


@dataclass
class Counters:
    """Events that clients counted, summed over all clients.

    `answered`: requests without an error. `wrong_errors`: errors of the server that no fault excuses.
    `calm_since`: the monotonic time since which nothing is broken.
    """

    acknowledged: Counter[str] = field(default_factory=Counter)
    retries: Counter[str] = field(default_factory=Counter)
    server_errors: Counter[str] = field(default_factory=Counter)
    wrong_errors: list[str] = field(default_factory=list)
    late_errors: list[str] = field(default_factory=list)
    torn_streams: list[str] = field(default_factory=list)
    slow: list[Attempt] = field(default_factory=list)
    other: Counter[str] = field(default_factory=Counter)
    answered: int = 0
    not_durable: int = 0
    calm_since: float | None = None
    _lock: Lock = field(default_factory=Lock)

    def count(self, counter: Counter[str], name: str) -> None:
        """Increment one count of `counter`."""
        with self._lock:
            counter[name] += 1

    @contextmanager
    def attempt(self, url: str) -> Iterator[None]:
        """Time a request, and count its error."""
        start = time.monotonic()
        outcome = "answered"
        try:
            yield
        except KvrecallError as error:
            outcome = error.code
            self._count_error(error)
            raise
        else:
            with self._lock:
                self.answered += 1
        finally:
            seconds = time.monotonic() - start
            if seconds > SLOW_SECONDS:
                self.slow.append(Attempt(url, start, seconds, outcome))

    def _count_error(self, error: KvrecallError) -> None:
        if error.status < 500:
            return
        text = f"{error.status} {error.code}"
        self.count(self.server_errors, text)
        if error.code not in ALLOWED_ERRORS or error.status not in (503, 507):
            self.wrong_errors.append(f"{text}: {error.detail}")
        elif self.calm_since is not None and time.monotonic() > self.calm_since:
            self.late_errors.append(f"{text}: {error.detail}")
