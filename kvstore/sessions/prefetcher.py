"""The thread that brings pages into memory before they are asked for."""

from contextlib import suppress
from threading import Condition, Thread

from kvstore.errors import KvStoreError
from kvstore.format.page import PageLayout
from kvstore.hierarchy.tier_stack import TierStack
from kvstore.sessions.directory import SessionDirectory


class Prefetcher:
    """Fetches the pages of sessions that were asked for, one after the other; one that waits already waits once."""

    def __init__(self, layout: PageLayout, stack: TierStack, sessions: SessionDirectory) -> None:
        self._layout = layout
        self._stack = stack
        self._sessions = sessions
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

    def _fetch(self, session: str) -> None:
        """The session's last pages, as far as they take half of the memory tier; as it is only a help, it may fail."""
        memory = self._stack.tiers.memory
        state = self._sessions.in_memory(session)
        if memory is None or memory.limit_bytes is None or state is None:
            return
        with suppress(KvStoreError):
            with state.lock:
                lost = set(state.table.lost())
                pages = [
                    state.table.expected(index)
                    for index in range(len(state.table))
                    if index not in lost
                ]
            hot = pages[::-1][: memory.limit_bytes // 2 // self._layout.page_bytes]
            held = memory.contains([page.key for page in hot])
            self._stack.bring_up(
                [page for page, is_held in zip(hot, held, strict=True) if not is_held]
            )

    def _next(self) -> str | None:
        with self._changed:
            while not self._closed and not self._waiting:
                self._changed.wait()
            if self._closed:
                return None
            session = next(iter(self._waiting))
            del self._waiting[session]
            return session
