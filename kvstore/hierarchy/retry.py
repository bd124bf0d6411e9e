"""Background thread that retries what tiers refused, at growing intervals."""

from collections.abc import Callable
from threading import Event, Lock, Thread

_FIRST_DELAY_SECONDS = 0.25
_MAX_DELAY_SECONDS = 15.0


class BackoffRetry:
    """Calls `attempt` after each `wake` until it returns True, which means nothing is left to do.

    The thread starts at the first `wake`.
    """

    def __init__(self, attempt: Callable[[], bool]) -> None:
        self._attempt = attempt
        self._woken = Event()
        self._closing = Event()
        self._thread: Thread | None = None
        self._lock = Lock()

    def wake(self) -> None:
        """Start retrying, because something was refused."""
        with self._lock:
            if self._thread is None and not self._closing.is_set():
                self._thread = Thread(target=self._run, name="kvstore-retry", daemon=True)
                self._thread.start()
        self._woken.set()

    def close(self) -> None:
        """Stop after the attempt that is running. May be called twice."""
        with self._lock:
            self._closing.set()
        self._woken.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            self._woken.wait()
            self._woken.clear()
            delay = _FIRST_DELAY_SECONDS
            while not self._closing.wait(delay) and not self._attempt():
                delay = min(2 * delay, _MAX_DELAY_SECONDS)
            if self._closing.is_set():
                return
