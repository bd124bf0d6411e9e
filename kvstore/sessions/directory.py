"""Directory of a store's sessions: in memory, only in the tiers, or deleted with retained pages."""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from threading import Lock

from kvstore.errors import StoreClosedError
from kvstore.format.page import encode_session_id
from kvstore.format.page_table import PageTable
from kvstore.sessions.state import StoredSession


class SessionDirectory:
    """Looks up and creates sessions. Safe to call from several threads.

    `stored` are sessions that an earlier process left in tiers that only this process writes;
    `recover` loads what the tiers have of one of them.
    """

    def __init__(self, stored: set[str], recover: Callable[[StoredSession], None]) -> None:
        self._recover = recover
        self._sessions: dict[str, StoredSession] = {}
        self._unopened = set(stored)
        self._unclaimed = set(stored)
        self._stored = sorted(stored)
        self._retained_pages: dict[str, int] = {}
        self._lock = Lock()
        self._closed = False

    @contextmanager
    def locked(
        self, session: str, *, create: bool = False, recover: bool = True
    ) -> Iterator[StoredSession]:
        """Lock the session and yield its state; an unknown session is empty unless created.

        Without `recover` nothing is read of a session that only the tiers have. Raises
        StoreClosedError, or a tier's error.
        """
        while True:
            state = self._find(session, create)
            with state.lock:
                # Another thread may have removed the session before it was locked.
                if not state.removed:
                    if recover and state.unopened and not state.loaded:
                        self._recover(state)
                    yield state
                    return

    def get_loaded(self, session: str) -> StoredSession | None:
        """The session if its state in memory is complete, else None."""
        state = self._sessions.get(session)
        return state if state is not None and state.loaded else None

    def get_versions(self, session: str) -> dict[int, int] | None:
        """Sequence number of each written page, by its number; None when the session is not loaded."""
        state = self.get_loaded(session)
        if state is None:
            return None
        with state.lock:
            return state.table.known_sequences()

    def remove(self, state: StoredSession, *, keep_pages: int = 0, unopened: bool = False) -> None:
        """Remove a locked session; its first pages may be retained, or all be left unopened."""
        state.removed = True
        with self._lock:
            if self._sessions.get(state.name) is state:
                del self._sessions[state.name]
            self._unopened.discard(state.name)
            self._unclaimed.discard(state.name)
            if unopened:
                self._unopened.add(state.name)
            if keep_pages:
                self._retained_pages[state.name] = keep_pages
            elif not unopened:
                self._retained_pages.pop(state.name, None)

    def names(self) -> list[str]:
        """Ids of the sessions that are in memory or unopened in the tiers, sorted."""
        with self._lock:
            return sorted(self._sessions.keys() | self._unopened)

    def states(self) -> list[StoredSession]:
        """States of the sessions in memory."""
        with self._lock:
            return list(self._sessions.values())

    def unclaimed(self, after: str = "", limit: int | None = None) -> list[str]:
        """Up to `limit` sessions of an earlier process that were not opened since, sorted.

        Those whose ids follow `after`. Takes time in proportion to `limit` and to the sessions that
        were opened or deleted since, not to all that are stored.
        """
        with self._lock:
            start = bisect_right(self._stored, after)
            following = islice(self._stored, start, None)
            return list(islice((name for name in following if name in self._unclaimed), limit))

    def take_unclaimed(self, session: str) -> bool:
        """Claim a session of an earlier process; False if it was opened or deleted since."""
        with self._lock:
            if session not in self._unclaimed:
                return False
            self._unclaimed.remove(session)
            return True

    def is_unopened(self, session: str) -> bool:
        """Return whether the tiers may hold unknown pages of a session that was not opened yet."""
        state = self._sessions.get(session)
        return session in self._unopened or (state is not None and state.unopened)

    def retained_pages(self, session: str) -> int:
        """Number of leading pages of a deleted session that are retained for its forks."""
        return self._retained_pages.get(session, 0)

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
            if create:
                self._unclaimed.discard(session)
            state = self._sessions.get(session)
            if state is None:
                unopened = session in self._unopened
                state = StoredSession(session, PageTable(session), unopened=unopened)
                if create:
                    encode_session_id(session)
                if create or unopened:
                    self._sessions[session] = state
                    self._unopened.discard(session)
            return state
