"""Prefetch thread: brings pages into memory before they are read."""

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
        """Fetch a session's pages from a bucket, then its last pages; store errors are ignored."""
        holders = self._sessions.holders
        self._context.stack.fetch_cold(self._list_pages(session), holders)
        memory = self._context.stack.tiers.memory
        if memory is None:
            return
        hot_pages = memory.room_bytes // 2 // self._context.layout.page_bytes
        hot = self._list_pages(session, hot_pages, hold=True)
        try:
            with suppress(KvStoreError):
                resident = memory.contains(hot)
                absent = [
                    page for page, is_there in zip(hot, resident, strict=True) if not is_there
                ]
                self._context.stack.promote(absent)
                self._context.stack.tiers.count(0, prefetched_pages=len(absent))
        finally:
            holders.release(hot)

    def _list_pages(
        self, session: str, limit: int | None = None, *, hold: bool = False
    ) -> list[PageId]:
        """List the pages of a session that are there, the last ones first; none if it is not open.

        `hold`: also hold them. No copy must come after a deletion.
        """
        state = self._sessions.get(session)
        if state is None:
            return []
        with state.lock:
            if state.removed:
                return []
            pages = [page_id for page_id in state.pages if page_id not in state.missing]
            listed = pages[::-1][:limit]
            if hold:
                self._sessions.holders.hold(listed)
            return listed

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
