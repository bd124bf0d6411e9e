"""Write-through from memory to durable tiers: the page writer, its callbacks and the retries."""

from collections.abc import Collection, Sequence
from concurrent.futures import Future

from kvstore.errors import TierFailedError
from kvstore.format.page import PageId
from kvstore.hierarchy.group_commit import Group, GroupCommit
from kvstore.hierarchy.page_holders import PageHolders
from kvstore.hierarchy.page_writer import PageWriter, QueuedPage, WriterCallbacks
from kvstore.hierarchy.retry import BackoffRetry
from kvstore.hierarchy.tier_stack import TierStack


class WriteThrough:
    """Owns the writer thread, the only thread that writes pages, and those of commits and retries.

    `retry` must call this object's `retry_refused`. It is created before, because the tier stack
    wakes it too.
    """

    def __init__(
        self, stack: TierStack, holders: PageHolders, retry: BackoffRetry, backlog_pages: int
    ) -> None:
        self._stack = stack
        self._retry = retry
        callbacks = WriterCallbacks(
            write=self._write,
            delete=stack.placement.delete,
            delete_copies=stack.placement.delete_copies,
            delete_undurable=stack.placement.delete_undurable,
            delete_moved=self._delete_moved,
            flush_pending=stack.placement.flush_pending,
            sync_deletions=stack.placement.sync,
            on_refused=retry.wake,
        )
        self.writer = PageWriter(callbacks, holders, backlog_pages)
        self._commits = GroupCommit(self._commit, stack.tiers.renew)
        stack.cold.start(self.writer.delete_moved)

    def flush(self, pages: Group) -> "Future[bool]":
        """Write submitted pages; True once all of them are durable.

        Pages that are flushed at the same time share one sync of each tier. Raises StoreClosedError.
        """
        return self._commits.submit(pages)

    def renew(self, pages: Group) -> None:
        """Restart the pages' time to live in the background."""
        self._commits.renew(pages)

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
        self._stack.cold.close()
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
        pages = {page_id for group in groups for page_id in group}
        if self.writer.drain(pages) or self._stack.placement.has_undurable(pages):
            self._stack.tiers.clear_failure()
            self.writer.drain(pages)
        refused = [self.writer.has_refused(group) for group in groups]
        flushed = self._stack.placement.flush(groups)
        return [is_durable and not left for is_durable, left in zip(flushed, refused, strict=True)]

    def _write(self, page: QueuedPage) -> None:
        self._stack.placement.write(
            page.id, page.rows, page.blob, key_id=page.key_id, replace=page.replace
        )

    def _delete_moved(self, pages: Collection[PageId]) -> None:
        self._stack.placement.delete_moved(self._stack.cold.confirm_moved(pages))
