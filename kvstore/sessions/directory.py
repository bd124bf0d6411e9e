"""Directory of a store's open sessions."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

from kvstore.errors import StoreClosedError
from kvstore.hierarchy.page_holders import PageHolders
from kvstore.sessions.state import StoredSession


class SessionDirectory:
    """Looks up and creates sessions. Safe to call from several threads.

    Attributes:
        holders: Counts the sessions that have a page.
    """

    def __init__(self, holders: PageHolders) -> None:
        self.holders = holders
        self._sessions: dict[str, StoredSession] = {}
        self._lock = Lock()
        self._closed = False

    @contextmanager
    def locked(self, session: str, *, create: bool = False) -> Iterator[StoredSession]:
        """Lock the session and yield its state; an unknown session is empty unless created.

        Raises StoreClosedError.
        """
        while True:
            state = self._find(session, create)
            with state.lock:
                # Another thread may have closed the session before it was locked.
                if not state.removed:
                    yield state
                    return

    def get(self, session: str) -> StoredSession | None:
        """The session, without locking it; None unless it is open."""
        return self._sessions.get(session)

    def remove(self, state: StoredSession) -> None:
        """Remove a locked session, which holds no page any more."""
        state.removed = True
        with self._lock:
            if self._sessions.get(state.name) is state:
                del self._sessions[state.name]
        self.holders.release(state.pages)

    def names(self) -> list[str]:
        """Ids of the open sessions, sorted."""
        with self._lock:
            return sorted(self._sessions)

    def states(self) -> list[StoredSession]:
        """States of the open sessions."""
        with self._lock:
            return list(self._sessions.values())

    def close(self) -> bool:
        """Refuse every later call; return False when the directory was closed already."""
        with self._lock:
            was_closed = self._closed
            self._closed = True
            return not was_closed

    def _find(self, session: str, create: bool) -> StoredSession:
        with self._lock:
            if self._closed:
                raise StoreClosedError("the row store is closed")
            state = self._sessions.get(session)
            if state is None:
                state = StoredSession(session)
                if create:
                    self._sessions[session] = state
            return state
