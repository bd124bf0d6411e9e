"""The thread that brings pages into memory before they are asked for."""

from collections.abc import Callable
from threading import Condition, Thread


class Prefetcher:
    """Calls `fetch` with each session that was asked for, one after the other; one that waits already waits once."""

    def __init__(self, fetch: Callable[[str], None]) -> None:
        self._fetch = fetch
        self._waiting: dict[str, None] = {}
        self._changed = Condition()
        self._closed = False
        self._thread = Thread(target=self._run, name="kvstore-prefetching", daemon=True)
        self._thread.start()

    def ask(self, session: str) -> None:
        """Fetch a session's pages when those asked for before are done."""
        with self._changed:
            self._waiting[session] = None
            self._changed.notify()

    def close(self) -> None:
        """Stop, after the session that is under way. May be called twice."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while (session := self._next()) is not None:
            self._fetch(session)

    def _next(self) -> str | None:
        with self._changed:
            while not self._closed and not self._waiting:
                self._changed.wait()
            if self._closed:
                return None
            session = next(iter(self._waiting))
            del self._waiting[session]
            return session
