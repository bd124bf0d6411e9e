"""What clients met: errors by request, and how long each request took until its answer."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from threading import Lock

from faults.load.counters import ALLOWED_ERRORS

ANSWERED = "answered"
# Errors after which a client of the drill is to repeat its request, beside 503 of ALLOWED_ERRORS.
EXPECTED = frozenset(
    {
        "connection_failed",
        "stream_broken",
        "409 session_busy",
        "409 stale_epoch",
        "429 overloaded",
        *(f"503 {code}" for code in ALLOWED_ERRORS),
    }
)


@dataclass(frozen=True)
class Seen:
    """An error that a client saw: monotonic time, status and code, key of the request."""

    at: float
    text: str
    key: str


@dataclass(frozen=True)
class Wait:
    """A request of a client: monotonic time of its first try, seconds until its answer."""

    start: float
    seconds: float
    client: str


@dataclass
class Tally:
    """Errors and waits of all clients, and requests that a client itself repeated, by the error.

    Errors that the client library repeated are in `errors` alone.
    """

    errors: list[Seen] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    repeated: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    _last: dict[str, str] = field(default_factory=dict)
    _answered: set[str] = field(default_factory=set)
    _lock: Lock = field(default_factory=Lock)

    def respond(self, key: str, at: float, text: str) -> None:
        """Count a response to the request with this key; `text` is ANSWERED, or its error."""
        with self._lock:
            self._last[key] = text
            if text != ANSWERED:
                self.errors.append(Seen(at, text, key))

    def repeat(self, key: str, at: float, text: str) -> None:
        """Count an error that reached the client: in a stream that had begun it was not seen yet."""
        with self._lock:
            self.repeated[text] += 1
            if self._last.get(key) == ANSWERED:
                self.errors.append(Seen(at, text, key))

    def answer(self, key: str, wait: Wait) -> None:
        """Count a request that is answered in the end."""
        with self._lock:
            self._answered.add(key)
            self.waits.append(wait)

    def fail(self, text: str) -> None:
        """Count a request that will not be answered, or an answer that is wrong."""
        with self._lock:
            self.failures.append(text)

    def clients_since(self, time: float) -> set[str]:
        """Names of the clients with an answer to a request that they began after `time`."""
        with self._lock:
            return {wait.client for wait in self.waits if wait.start > time}

    def errors_between(self, start: float, end: float) -> list[Seen]:
        """Errors that were seen between two monotonic times."""
        return [seen for seen in self.errors if start <= seen.at < end]

    def longest_wait(self, start: float, end: float) -> float:
        """Seconds of the longest wait of which a part lies between two monotonic times."""
        return max(
            (
                wait.seconds
                for wait in self.waits
                if wait.start < end and wait.start + wait.seconds > start
            ),
            default=0.0,
        )

    def count_recovered(self, errors: Iterable[Seen]) -> int:
        """Count the errors whose request was answered in the end."""
        return sum(seen.key in self._answered for seen in errors)

    def unexpected(self) -> list[str]:
        """Errors that no client should see, as often as they were seen."""
        return [seen.text for seen in self.errors if seen.text not in EXPECTED]
