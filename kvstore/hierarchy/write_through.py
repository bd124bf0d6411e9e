"""From memory to durable: the page writer, what it does with a page, and trying again what the tiers refused."""

from collections.abc import Collection, Sequence

from kvstore.errors import TierFailedError
from kvstore.format.page import PageKey, PageLayout
from kvstore.format.summaries import PageSummaries
from kvstore.hierarchy.epochs import WriterEpochs
from kvstore.hierarchy.page_writer import PageWriter, QueuedPage, Work
from kvstore.hierarchy.retry import BackoffRetry
from kvstore.hierarchy.tier_stack import TierStack


class WriteThrough:
    """Owns the writer's thread, which alone writes to the tiers of `stack`, and the thread that tries again.

    `retrying` is `BackoffRetry` of this object's `retry`: the tiers, which are there before this, wake it too.
    """

    def __init__(
        self,
        layout: PageLayout,
        stack: TierStack,
        summaries: PageSummaries,
        epochs: WriterEpochs,
        retrying: BackoffRetry,
        backlog_pages: int,
    ) -> None:
        self._layout = layout
        self._stack = stack
        self._summaries = summaries
        self._retrying = retrying
        work = Work(self._write, self._delete, stack.placement.settle_owed, retrying.wake)
        self.writer = PageWriter(work, epochs, backlog_pages)

    def flush(self, sessions: Collection[str]) -> bool:
        """Whether all pages of these sessions that were handed over are durable now."""
        refused = self.writer.drain(sessions)
        if refused or self._stack.placement.undurable(sessions):
            self._stack.tiers.try_again()
            refused = self.writer.drain(sessions)
        return self._stack.placement.flush(sessions) and not refused

    def finish(self) -> None:
        """Return when nothing is on its way. Raises a tier's error when none takes what has to be written."""
        self._stack.tiers.try_again()
        for error in self.writer.drain():
            raise error

    def retry(self) -> bool:
        """Try again what was refused; whether nothing is left."""
        self._stack.tiers.probe()
        self.writer.drain()
        return not self.writer.refuses() and not self._stack.placement.owes()

    def close(self) -> None:
        """Stop both threads, then close the tiers, whatever the last flush says.

        Raises a tier's error when rows are in no tier that outlives the process though one should have them.
        """
        self._retrying.close()
        try:
            self.finish()
            self._stack.tiers.lowest.flush()
            if self._stack.placement.undurable():
                raise TierFailedError("rows that no durable tier took end with the process")
        finally:
            self.writer.close()
            self._stack.tiers.close()

    def _write(self, pending: QueuedPage) -> None:
        self._stack.placement.write(
            pending.page, pending.rows, pending.blob, epoch=pending.epoch, cut=pending.cut
        )
        if pending.rows.shape[3] == self._layout.page_tokens:
            self._summaries.make(pending.page, pending.rows[:, 0])

    def _delete(self, keys: Sequence[PageKey], epoch: int | None) -> None:
        self._summaries.forget(keys)
        self._stack.placement.delete(keys, epoch)
