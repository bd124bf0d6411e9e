"""Log lines of something that does not answer: at its end and its return, and few meanwhile."""

import time
from collections.abc import Callable
from typing import Any

# Between two lines about the same outage.
_FIRST_SILENCE_SECONDS = 60.0
_LONGEST_SILENCE_SECONDS = 600.0


class Outage:
    """Log lines about one thing that others wait for: the first failure, then ever fewer, then the end.

    At most one a minute between these. `failing` and `answering` are the events; `log` writes them.
    """

    def __init__(
        self,
        log: Any,
        failing: str,
        answering: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log = log
        self._failing = failing
        self._answering = answering
        self._clock = clock
        self._began: float | None = None
        self._next = 0.0

    def note(self, reason: str, **fields: object) -> None:
        """Log a failure, unless the last line is too recent: each wait is twice the time so far."""
        now = self._clock()
        if self._began is None:
            self._began = self._next = now
        if now < self._next:
            return
        seconds = now - self._began
        self._next = now + max(_FIRST_SILENCE_SECONDS, min(2 * seconds, _LONGEST_SILENCE_SECONDS))
        self._log.warning(self._failing, reason=reason, seconds=round(seconds), **fields)

    def end(self, **fields: object) -> None:
        """Log that it answers again, if it did not."""
        if self._began is not None:
            seconds = round(self._clock() - self._began)
            self._log.info(self._answering, seconds=seconds, **fields)
        self._began = None
