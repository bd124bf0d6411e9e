"""Write-through from memory to durable tiers: the page writer, its callbacks and the retries."""

from collections.abc import Sequence
from concurrent.futures import Future

from kvstore.errors import TierFailedError
from kvstore.format.page import PageKey
from kvstore.hierarchy.epochs import WriterEpochs
from kvstore.hierarchy.group_commit import Group, GroupCommit
from kvstore.hierarchy.page_writer import PageWriter, QueuedPage, WriterCallbacks
from kvstore.hierarchy.retry import BackoffRetry
from kvstore.hierarchy.tier_stack import TierStack


class WriteThrough:
    """Owns the writer thread, the only thread that writes pages, and those of commits and retries.

    `retry` must call this object's `retry_refused`. It is created before, because the tier stack
    wakes it too.
    """

    def __init__(
        self,
        stack: TierStack,
        epochs: WriterEpochs,
        retry: BackoffRetry,
        backlog_pages: int,
    ) -> None:
        self._stack = stack
        self._retry = retry
        callbacks = WriterCallbacks(
            write=self._write,
            delete=self._delete,
            flush_pending=stack.placement.flush_pending,
            sync_deletions=stack.placement.sync,
            on_refused=retry.wake,
        )
        self.writer = PageWriter(callbacks, epochs, backlog_pages)
        self._commits = GroupCommit(self._commit, stack.tiers.touch)

    def flush(self, sessions: Group) -> "Future[bool]":
        """Write the submitted pages of these sessions; True once all of them are durable.

        Sessions that are flushed at the same time share one sync of each tier. Also restarts the
        sessions' time to live. Raises StoreClosedError.
        """
        return self._commits.submit(sessions)

    def renew(self, sessions: Group) -> None:
        """Restart the sessions' time to live in the background."""
        self._commits.renew(sessions)

    def finish(self) -> None:
        """Wait until every task is done. Raises a tier's error when no tier accepts a page."""
        self._stack.tiers.clear_failure()
        for error in self.writer.drain():
            raise error

    def retry_refused(self) -> bool:
        """Retry what was refused; return whether nothing is left to retry."""
        self._stack.tiers.probe()
        self.writer.drain()
        return not self.writer.has_refused() and not self._stack.placement.has_pending()

    def close(self) -> None:
        """Stop all threads, then close the tiers, even when the last flush fails.

        Raises a tier's error when rows are in no durable tier though the store has one.
        """
        self._retry.close()
        self._commits.close()
        try:
            self.finish()
            self._stack.tiers.lowest.flush()
            if self._stack.placement.has_undurable():
                raise TierFailedError(
                    "some rows were refused by every durable tier and end with the process; "
                    "they are computed again at the session's next use"
                )
        finally:
            self.writer.close()
            self._stack.tiers.close()

    def _commit(self, groups: Sequence[Group]) -> list[bool]:
        sessions = {session for group in groups for session in group}
        if self.writer.drain(sessions) or self._stack.placement.has_undurable(sessions):
            self._stack.tiers.clear_failure()
            self.writer.drain(sessions)
        refused = [self.writer.has_refused(group) for group in groups]
        flushed = self._stack.placement.flush(groups)
        return [is_durable and not left for is_durable, left in zip(flushed, refused, strict=True)]

    def _write(self, queued: QueuedPage) -> None:
        self._stack.placement.write(queued.page, queued.rows, queued.blob, epoch=queued.epoch)

    def _delete(self, keys: Sequence[PageKey], epoch: int | None) -> None:
        self._stack.placement.delete(keys, epoch)
