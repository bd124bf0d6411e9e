"""The thread that tries again what tiers refused, at growing intervals."""

from collections.abc import Callable
from threading import Event, Lock, Thread

_FIRST_PAUSE_SECONDS = 0.25
_LONGEST_PAUSE_SECONDS = 15.0


class BackoffRetry:
    """Calls `attempt` from `wake` on until it returns True, which says that nothing is left to do."""

    def __init__(self, attempt: Callable[[], bool]) -> None:
        self._attempt = attempt
        self._woken = Event()
        self._closing = Event()
        self._thread: Thread | None = None
        self._lock = Lock()

    def wake(self) -> None:
        """Something was refused."""
        with self._lock:
            if self._thread is None and not self._closing.is_set():
                self._thread = Thread(target=self._run, name="kvstore-retrying", daemon=True)
                self._thread.start()
        self._woken.set()

    def close(self) -> None:
        """Stop, after an attempt that is under way. May be called twice."""
        with self._lock:
            self._closing.set()
        self._woken.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            self._woken.wait()
            self._woken.clear()
            pause = _FIRST_PAUSE_SECONDS
            while not self._closing.wait(pause) and not self._attempt():
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            if self._closing.is_set():
                return
