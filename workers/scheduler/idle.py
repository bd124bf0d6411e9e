"""Idle sessions: which of the open ones leave memory, after a time or above a bound on bytes."""

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

# A session that was just opened must still be there when its first turn arrives.
_LEAST_SECONDS = 10.0


@dataclass(frozen=True)
class _Use:
    """Last use of a session, and the bytes that it holds in memory."""

    at: float
    nbytes: int


class IdleSessions:
    """Open sessions in the order of their last use. Only the scheduler's thread touches it.

    Times are seconds of a monotonic clock.
    """

    def __init__(
        self, idle_seconds: float, max_bytes: int, least_seconds: float = _LEAST_SECONDS
    ) -> None:
        """Release after `idle_seconds`; above `max_bytes` in all, after `least_seconds`."""
        self._idle_seconds = idle_seconds
        self._least_seconds = min(least_seconds, idle_seconds)
        self._max_bytes = max_bytes
        self._uses: OrderedDict[str, _Use] = OrderedDict()
        self.nbytes = 0

    def use(self, name: str, now: float) -> None:
        """Record a use."""
        known = self._uses.pop(name, _Use(now, 0))
        self._uses[name] = _Use(now, known.nbytes)

    def measure(self, name: str, nbytes: int) -> None:
        """Record the bytes of a session that was used before."""
        known = self._uses.get(name)
        if known is not None:
            self.nbytes += nbytes - known.nbytes
            self._uses[name] = _Use(known.at, nbytes)

    def forget(self, name: str) -> None:
        """Remove a session that was closed. Unknown ones are ignored."""
        known = self._uses.pop(name, None)
        if known is not None:
            self.nbytes -= known.nbytes

    def last_use(self, name: str) -> float:
        """Time of the last use; 0 if there was none."""
        known = self._uses.get(name)
        return 0.0 if known is None else known.at

    def seconds_until_due(self, now: float) -> float | None:
        """Seconds until the longest idle session is due; None without a session."""
        oldest = next(iter(self._uses.values()), None)
        return None if oldest is None else max(0.0, oldest.at + self._patience() - now)

    def take_due(self, busy: Collection[str], now: float) -> list[str]:
        """Remove and return the sessions to release; those that are busy count as used now."""
        due = list[str]()
        while self.seconds_until_due(now) == 0.0:
            name = next(iter(self._uses))
            if name in busy:
                self.use(name, now)
            else:
                self.forget(name)
                due.append(name)
        return due

    def _patience(self) -> float:
        return self._least_seconds if self.nbytes > self._max_bytes else self._idle_seconds
