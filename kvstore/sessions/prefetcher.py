"""Prefetch thread: brings pages into memory before they are read."""

from collections.abc import Sequence
from contextlib import suppress
from threading import Condition, Thread

from kvstore.errors import KvStoreError
from kvstore.format.page import PageId
from kvstore.sessions.context import StoreContext
from kvstore.sessions.directory import SessionDirectory


class Prefetcher:
    """Prefetches the pages of requested sessions, one session at a time.

    A session that is requested again while it waits is fetched once.
    """

    def __init__(self, context: StoreContext, sessions: SessionDirectory) -> None:
        self._context = context
        self._sessions = sessions
        self._waiting: dict[str, None] = {}
        self._changed = Condition()
        self._fetching = False
        self._closed = False
        self._thread = Thread(target=self._run, name="kvstore-prefetch", daemon=True)
        self._thread.start()

    def request(self, session: str) -> None:
        """Queue a session to prefetch its pages."""
        with self._changed:
            self._waiting[session] = None
            self._changed.notify_all()

    def finish(self) -> None:
        """Wait until every session that was requested is fetched, or the prefetcher is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not (self._waiting or self._fetching))

    def close(self) -> None:
        """Stop after the session that is being fetched. May be called twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while (session := self._next()) is not None:
            self._fetch(session)

    def _fetch(self, session: str) -> None:
        """Fetch what of a session lies in a bucket, then its last pages; store errors are ignored."""
        state = self._sessions.get(session)
        if state is None:
            return
        holders = self._sessions.holders
        with state.lock:
            if state.removed:
                return
            pages = [page_id for page_id in state.pages if page_id not in state.missing]
            holders.hold(pages)  # No copy must come after a deletion.
        try:
            self._context.stack.fetch_cold(pages)
            with suppress(KvStoreError):
                self._promote(pages)
        finally:
            holders.release(pages)

    def _promote(self, pages: Sequence[PageId]) -> None:
        """Copy the last of the pages into memory, up to half of what it has room for."""
        stack = self._context.stack
        memory = stack.tiers.memory
        if memory is None:
            return
        hot = pages[::-1][: memory.room_bytes // 2 // self._context.layout.page_bytes]
        resident = memory.contains(hot)
        absent = [page for page, is_there in zip(hot, resident, strict=True) if not is_there]
        stack.promote(absent)
        stack.tiers.count(0, prefetched_pages=len(absent))

    def _next(self) -> str | None:
        with self._changed:
            self._fetching = False
            self._changed.notify_all()
            while not self._closed and not self._waiting:
                self._changed.wait()
            if self._closed:
                return None
            session = next(iter(self._waiting))
            del self._waiting[session]
            self._fetching = True
            return session
