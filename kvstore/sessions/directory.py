"""The sessions of a store: those in memory, those that only the tiers have, and what is kept of those that are gone."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock

from kvstore.errors import StoreClosedError
from kvstore.format.page import session_name_bytes
from kvstore.format.page_table import PageTable
from kvstore.sessions.state import StoredSession


class SessionDirectory:
    """Finds and makes sessions. Safe to call from several threads.

    `stored` are the sessions that an earlier process left in tiers that only this one writes; `recover` finds out what
    one of them has.
    """

    def __init__(self, stored: set[str], recover: Callable[[StoredSession], None]) -> None:
        self._recover = recover
        self._sessions: dict[str, StoredSession] = {}
        self._left = set(stored)
        self._left_by_others = set(stored)
        self._kept: dict[str, int] = {}
        self._lock = Lock()
        self._closed = False

    @contextmanager
    def locked(
        self, session: str, *, create: bool = False, recover: bool = True
    ) -> Iterator[StoredSession]:
        """The session's state with its lock held. Unless it shall be made, a session that is not there is empty.

        Without `recover` nothing is read of one that only the tiers have. Raises StoreClosedError, and what a tier
        failed with.
        """
        while True:
            state = self._find(session, create)
            with state.lock:
                # Between finding a session and locking it another thread may have dropped it.
                if not state.dropped:
                    if recover and state.left and not state.known:
                        self._recover(state)
                    yield state
                    return

    def in_memory(self, session: str) -> StoredSession | None:
        """The session, if all that is known of it is here."""
        state = self._sessions.get(session)
        return state if state is not None and state.known else None

    def versions(self, session: str, page_tokens: int) -> dict[int, tuple[int, int]] | None:
        """Of a session in memory each page's sequence number and tokens, by index; None if it is not."""
        state = self.in_memory(session)
        if state is None:
            return None
        with state.lock:
            numbers = [(index, state.table.sequence(index)) for index in range(len(state.table))]
            return {
                i: (number, state.filled(i, page_tokens))
                for i, number in numbers
                if number is not None
            }

    def remove(self, state: StoredSession, *, keep_pages: int = 0, left: bool = False) -> None:
        """Forget a session whose lock is held, but that its first pages are kept, or that it is left in the tiers."""
        state.dropped = True
        with self._lock:
            if self._sessions.get(state.name) is state:
                del self._sessions[state.name]
            self._left.discard(state.name)
            self._left_by_others.discard(state.name)
            if left:
                self._left.add(state.name)
            if keep_pages:
                self._kept[state.name] = keep_pages
            elif not left:
                self._kept.pop(state.name, None)

    def names(self) -> list[str]:
        """Of the sessions that are in memory or were left, sorted."""
        with self._lock:
            return sorted(self._sessions.keys() | self._left)

    def states(self) -> list[StoredSession]:
        """The sessions in memory."""
        with self._lock:
            return list(self._sessions.values())

    def left_by_others(self) -> list[str]:
        """Sessions that an earlier process left and nobody has opened or appended to since, sorted."""
        with self._lock:
            return sorted(self._left_by_others)

    def is_left(self, session: str) -> bool:
        """Whether the tiers may hold whatever they hold of the session, since nobody has opened it yet."""
        state = self._sessions.get(session)
        return session in self._left or (state is not None and state.left)

    def kept_pages(self, session: str) -> int:
        """How many first pages of a session that is gone are kept for others."""
        return self._kept.get(session, 0)

    def close(self) -> bool:
        """Refuse every call from now on; False if that was so already."""
        with self._lock:
            was_closed = self._closed
            self._closed = True
            return not was_closed

    def _find(self, session: str, create: bool) -> StoredSession:
        with self._lock:
            if self._closed:
                raise StoreClosedError("the row store is closed")
            if create:
                self._left_by_others.discard(session)
            state = self._sessions.get(session)
            if state is None:
                left = session in self._left
                state = StoredSession(session, PageTable(session), left=left)
                if create:
                    session_name_bytes(session)
                if create or left:
                    self._sessions[session] = state
                    self._left.discard(session)
            return state
