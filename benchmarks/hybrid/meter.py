"""CPU time of named parts of a service that runs, on whatever thread they run."""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any


class Meter:
    """Adds up the CPU seconds of metered methods since the last `take`, by the name of their part.

    The parts must not call each other.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._lock = Lock()

    def watch(self, owner: object, methods: Sequence[str], part: str) -> None:
        """Meter an object's methods from now on."""
        for name in methods:
            setattr(owner, name, self._wrap(getattr(owner, name), part))

    def take(self) -> dict[str, float]:
        """Return the seconds of each part, and begin anew."""
        with self._lock:
            taken, self._seconds = self._seconds, defaultdict(float)
        return dict(taken)

    def _wrap(self, method: Callable[..., Any], part: str) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            began = time.thread_time()
            try:
                return method(*arguments, **named)
            finally:
                spent = time.thread_time() - began
                with self._lock:
                    self._seconds[part] += spent

        return run
