"""Opening and closing of sessions, and deletion of pages that no session has."""

from collections.abc import Sequence

from kvstore.format.page import PageId
from kvstore.sessions.context import StoreContext
from kvstore.sessions.directory import SessionDirectory
from kvstore.sessions.presence import find_absent
from kvstore.sessions.state import StoredSession


class SessionOpener:
    """Opens and closes sessions whose locks the caller holds."""

    def __init__(self, context: StoreContext, sessions: SessionDirectory) -> None:
        self._context = context
        self._sessions = sessions

    def open(self, state: StoredSession, ids: Sequence[PageId]) -> None:
        """Give the session exactly these pages, of which those that no tier has are missing.

        Raises the lowest tier's error; then nothing has changed.
        """
        holders = self._sessions.holders
        # Held first: from now on no deletion takes them.
        holders.hold(ids)
        try:
            known = set(state.pages) - state.missing
            # What another worker moved into the bucket is worth a question: else it is computed again.
            missing = find_absent(
                self._context, [each for each in ids if each not in known], ask=True
            )
        except BaseException:
            holders.release(ids)
            if not state.length:
                self._sessions.remove(state)  # It was created for this.
            raise
        holders.release(state.pages)
        self._context.writer.discard(state.pages)
        state.pages = list(ids)
        state.missing = missing
        state.unflushed = {}
        for page_id in ids:
            if self._is_on_its_way(page_id):
                state.mark_unflushed(page_id)
        state.behind = []
        state.length = len(ids) * self._context.layout.page_tokens

    def close(self, state: StoredSession) -> None:
        """Forget the session; its pages stay in all tiers."""
        self._sessions.remove(state)

    def release(self, state: StoredSession) -> None:
        """Forget a session that continues in another process.

        Above a shared lowest tier the copies of its pages that no session holds are deleted.
        """
        self._context.writer.drain(state.unflushed)
        self._sessions.remove(state)
        if self._context.stack.tiers.lowest.shared:
            self._context.writer.delete_copies(state.pages)

    def split_free(self, ids: Sequence[PageId]) -> tuple[list[PageId], list[PageId]]:
        """Split pages into those that no session here has, and the others."""
        free = self._sessions.holders.select_free(ids)
        known = set(free)
        return free, [page_id for page_id in ids if page_id not in known]

    def delete(self, ids: Sequence[PageId]) -> None:
        """Queue the deletion of pages, but for those that a session has by then.

        Failed deletions are retried in the background.
        """
        self._context.writer.delete(ids)
        self._context.stack.tiers.clear_failure()

    def _is_on_its_way(self, page_id: PageId) -> bool:
        """Return whether a page is not in the lowest tier yet, written for this session or another."""
        queued = self._context.writer.get_queued(page_id)
        return queued is not None or self._context.stack.placement.is_pending(page_id)
