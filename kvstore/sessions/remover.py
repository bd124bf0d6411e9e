"""Removal of sessions: deletion, clean-up after an earlier process, and release to another one."""

from contextlib import suppress

from kvstore.errors import TierError
from kvstore.sessions.context import StoreContext
from kvstore.sessions.directory import SessionDirectory
from kvstore.tiers.base import UNFENCED


class SessionRemover:
    """Removes sessions from memory and from the tiers."""

    def __init__(self, context: StoreContext, sessions: SessionDirectory) -> None:
        self._context = context
        self._sessions = sessions

    def delete(self, session: str, keep_pages: int, fence: int = UNFENCED) -> None:
        """Queue the deletion of a session from every tier, except its first `keep_pages` pages.

        Failed deletions are retried in the background. The session's epoch is not checked: the
        caller has decided that no process writes the session any more under an epoch before
        `fence`. Raises a tier's error when it cannot list its pages.
        """
        stack = self._context.stack
        with self._sessions.locked(session, recover=False) as state:
            # Fenced first: a concurrent write is either complete and deleted below, or refused.
            with suppress(TierError):
                stack.tiers.fence(session, fence)
            keys = set(state.table.own_keys(keep_pages))
            stored = stack.stored_keys(session, must_answer=not state.loaded)
            # A page that no tier has accepted yet would be written after the deletion.
            stored |= self._context.writer.queued_keys(session)
            keys |= {key for key in stored if key.index >= keep_pages}
            self._sessions.remove(state, keep_pages=keep_pages)
            self._context.epochs.forget(session)
            self._context.writer.delete(sorted(keys), None)
        stack.tiers.clear_failure()

    def delete_unclaimed(self, session: str, keep_pages: int) -> bool:
        """Delete a session of an earlier process, except its first `keep_pages` pages.

        Above a shared lowest tier only the copies are deleted. Returns False, and changes nothing,
        when the session was opened or deleted since. Raises as `delete`.
        """
        if not self._sessions.take_unclaimed(session):
            return False
        if self._context.stack.tiers.lowest.shared:
            self._delete_copies(session, keep_pages)
        else:
            self.delete(session, keep_pages)
        return True

    def release(self, session: str) -> None:
        """Remove a session from memory and, above a shared lowest tier, from the other tiers."""
        shared = self._context.stack.tiers.lowest.shared
        with self._sessions.locked(session, recover=False) as state:
            self._context.writer.drain([session])
            self._sessions.remove(state, unopened=not shared)
            self._forget_epochs(session)
        if shared:
            self._delete_copies(session, 0)

    def unload(self, session: str) -> None:
        """Forget a session's page table; rows in memory alone keep it loaded."""
        context = self._context
        with self._sessions.locked(session, recover=False) as state:
            unwritten = (
                bool(state.behind)
                or context.writer.has_tasks(session)
                or context.stack.placement.has_undurable([session])
            )
            if not state.loaded or unwritten:
                return
            if context.stack.tiers.lowest.shared:
                # Its epoch is fenced off there, and only an open may say what its rows are.
                self._sessions.remove(state)
                self._forget_epochs(session)
            else:
                state.unload()

    def _forget_epochs(self, session: str) -> None:
        """Forget the epochs of a session; queued tasks still run under the current one."""
        if not self._context.writer.has_tasks(session):
            self._context.epochs.forget(session)

    def _delete_copies(self, session: str, keep_pages: int) -> None:
        stored = self._context.stack.stored_keys(session, above=True)
        keys = [key for key in stored if key.index >= keep_pages]
        self._context.stack.placement.delete_copies(keys)
