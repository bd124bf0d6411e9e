"""Sessions that go: deleted for good, left behind by an earlier process, or taken on by another one."""

from collections.abc import Collection, Sequence
from contextlib import suppress

from kvstore.errors import PageError, TierError
from kvstore.format.page_table import SharedPages
from kvstore.format.summaries import PageSummaries
from kvstore.hierarchy.epochs import WriterEpochs
from kvstore.hierarchy.page_writer import PageWriter
from kvstore.hierarchy.tier_stack import TierStack
from kvstore.sessions.directory import SessionDirectory
from kvstore.sessions.writer import RowWriter
from kvstore.tiers.base import UNFENCED


class SessionRemover:
    """Removes sessions from memory and from the tiers."""

    def __init__(
        self,
        stack: TierStack,
        writer: PageWriter,
        rows: RowWriter,
        sessions: SessionDirectory,
        summaries: PageSummaries,
        epochs: WriterEpochs,
    ) -> None:
        self._stack = stack
        self._writer = writer
        self._rows = rows
        self._sessions = sessions
        self._summaries = summaries
        self._epochs = epochs

    def drop(self, session: str, keep_pages: int) -> None:
        """Forget a session in every tier, but for its own first pages. What a tier does not delete is tried again.

        Whoever wrote it last: that a session is deleted is decided elsewhere, and nobody writes it any more.
        """
        with self._sessions.locked(session, recover=False) as state:
            # First, so that what others are writing now either is there to be deleted or is refused.
            with suppress(TierError):
                self._stack.tiers.fence(session, UNFENCED)
            keys = set(state.table.own_keys(keep_pages))
            stored = self._stack.stored_keys(session, must_answer=not state.known)
            keys |= {key for key in stored if key.index >= keep_pages}
            self._sessions.remove(state, keep_pages=keep_pages)
            self._epochs.forget(session)
            self._writer.discard(sorted(keys), None)
        self._stack.tiers.try_again()
        self._writer.drain([session])

    def retain(self, sessions: Collection[str], shared: Sequence[SharedPages]) -> list[str]:
        """Of the sessions that an earlier process left, drop those that are not named; returns them."""
        kept = {entry.owner: entry.pages for entry in shared}
        dropped = [
            session for session in self._sessions.left_by_others() if session not in sessions
        ]
        for session in dropped:
            if self._stack.tiers.lowest.shared:
                self._forget_copies(session, kept.get(session, 0))
            else:
                self.drop(session, kept.get(session, 0))
        return dropped

    def release(self, session: str) -> None:
        """Forget a session in memory, and where others write the lowest tier too in those above it."""
        shared = self._stack.tiers.lowest.shared
        with self._sessions.locked(session, recover=False) as state:
            with suppress(PageError):
                self._rows.hand_over_unfinished_page(state)
            self._writer.drain([session])
            self._sessions.remove(state, left=not shared)
        if shared:
            self._forget_copies(session, 0)

    def _forget_copies(self, session: str, keep_pages: int) -> None:
        keys = [
            key for key in self._stack.stored_keys(session, above=True) if key.index >= keep_pages
        ]
        self._summaries.forget(keys)
        self._stack.placement.forget_copies(keys)
