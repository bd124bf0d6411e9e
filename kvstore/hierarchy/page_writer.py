"""Writer thread: brings pages to the tiers, so that callers do not wait for a disk.

Queued pages stay readable here until the tiers have them. Refused tasks are kept and tried again;
no submitted page is lost while the process lives.

Whoever submits a page holds it (`PageHolders`). A deletion takes the pages that nobody holds when its
turn comes, and none that was submitted after it.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from threading import Condition, Event, Thread

from torch import Tensor

from kvstore.errors import KvStoreError, StoreClosedError, TierFailedError
from kvstore.format.page import NO_KEY, Blob, PageId
from kvstore.hierarchy.page_holders import PageHolders


@dataclass(frozen=True, eq=False)
class QueuedPage:
    """A page that is submitted to be written.

    Attributes:
        id: Id of the page.
        rows: Rows `[page_layers, parts, n_kv_heads, page_tokens, head_dim]`, contiguous, never changed.
        blob: The encoded page when encoding changed the rows, else None.
        key_id: Id of the key that it is encrypted with where it lasts.
        replace: Whether it is written even if the tiers have it: theirs may be damaged.
    """

    id: PageId
    rows: Tensor
    blob: Blob | None
    key_id: bytes = NO_KEY
    replace: bool = False

    @property
    def ids(self) -> Collection[PageId]:
        """The page alone, as a task."""
        return (self.id,)


@dataclass(eq=False)
class _Deletion:
    """Deletes pages by a callback; `everywhere`: queued ones too; `held`: pages of open sessions too."""

    ids: set[PageId]
    run: Callable[[Collection[PageId]], None]
    everywhere: bool = True
    held: bool = False


@dataclass(frozen=True, eq=False)
class _Barrier:
    """Flushes those of the pages `ids` that are pending (None: all), then sets `reached`."""

    ids: Collection[PageId] | None
    reached: Event = field(default_factory=Event)


_Task = QueuedPage | _Deletion | _Barrier


@dataclass(frozen=True)
class _Refused:
    task: QueuedPage | _Deletion
    error: KvStoreError

    def concerns(self, ids: Collection[PageId] | None) -> bool:
        """Return whether the task writes or deletes one of these pages; None: any."""
        return ids is None or any(page_id in ids for page_id in self.task.ids)


@dataclass(frozen=True)
class WriterCallbacks:
    """Operations of the writer thread.

    Attributes:
        write: Write a page to the tiers.
        delete: Delete pages from the tiers.
        delete_copies: Delete them from the tiers above the lowest, but pending ones.
        delete_undurable: Delete those that memory has alone.
        delete_moved: Delete those that lie in a bucket from the lowest tier.
        sync_deletions: Make the deletions so far durable; raises a tier's error.
        flush_pending: Move those of some pages that are pending, or all, to the lowest tier.
        on_refused: Called when a task has to be tried again.
    """

    write: Callable[[QueuedPage], None]
    delete: Callable[[Collection[PageId]], None]
    delete_copies: Callable[[Collection[PageId]], None]
    delete_undurable: Callable[[Collection[PageId]], None]
    delete_moved: Callable[[Collection[PageId]], None]
    sync_deletions: Callable[[], None]
    flush_pending: Callable[[Collection[PageId] | None], None]
    on_refused: Callable[[], None]


class PageWriter:
    """Writes and deletes pages in the order of submission, in a thread of its own."""

    def __init__(
        self, callbacks: WriterCallbacks, holders: PageHolders, backlog_pages: int
    ) -> None:
        self._callbacks = callbacks
        self._holders = holders
        self._backlog_pages = backlog_pages
        self._changed = Condition()
        self._tasks: deque[_Task] = deque()
        self._queued: dict[PageId, QueuedPage] = {}
        self._refused: list[_Refused] = []
        self._deletions = 0
        self._synced_deletions = 0
        self._closed = False
        self._thread = Thread(target=self._run, name="kvstore-page-writer", daemon=True)
        self._thread.start()

    def wait_for_room(self) -> None:
        """Wait until the backlog is below its limit.

        Raises a tier's error when the backlog is full and pages were refused, StoreClosedError
        after `close`.
        """
        with self._changed:
            while len(self._queued) >= self._backlog_pages:
                self._require_open()
                for refused in self._refused:
                    if isinstance(refused.task, QueuedPage):
                        raise refused.error
                self._changed.wait()

    def submit(self, page: QueuedPage) -> None:
        """Queue a page that the caller holds, unless it is queued already and need not be replaced."""
        with self._changed:
            self._require_open()
            self._cancel_deletions(page.id)
            if page.replace or page.id not in self._queued:
                self._queued[page.id] = page
                self._tasks.append(page)
                self._changed.notify_all()

    def delete(self, ids: Iterable[PageId]) -> None:
        """Delete those of the pages from the tiers that nobody holds by then, queued ones too."""
        self._add_deletion(_Deletion(set(ids), self._callbacks.delete))

    def delete_copies(self, ids: Iterable[PageId]) -> None:
        """Delete those of the pages that nobody holds by then from the tiers above the lowest."""
        run = self._callbacks.delete_copies
        self._add_deletion(_Deletion(set(ids), run, everywhere=False))

    def delete_moved(self, ids: Collection[PageId]) -> None:
        """Delete pages from the lowest tier that lie in a bucket, also those that sessions hold."""
        run = self._callbacks.delete_moved
        self._add_deletion(_Deletion(set(ids), run, everywhere=False, held=True))

    def discard(self, ids: Collection[PageId]) -> None:
        """Write those of the pages no more that no durable tier has yet and that nobody holds."""
        run = self._callbacks.delete_undurable
        self._add_deletion(_Deletion(set(ids), run, everywhere=False))
        with self._changed:
            queued = [page_id for page_id in ids if page_id in self._queued]
            dropped = {self._queued.pop(each) for each in self._holders.select_free(queued)}
            self._refused = [each for each in self._refused if each.task not in dropped]
            self._changed.notify_all()

    def get_queued(self, page_id: PageId) -> QueuedPage | None:
        """Return the page while it is queued; None once the tiers have it or it was discarded."""
        return self._queued.get(page_id)

    def drain(self, ids: Collection[PageId] | None = None) -> list[KvStoreError]:
        """Wait until all tasks submitted so far are done and refused ones were tried once more.

        Deletions are durable then. Returns the errors of tasks of these pages (None: of all)
        that were refused again, and of deletions that are not durable.
        """
        barrier = _Barrier(ids)
        with self._changed:
            self._require_open()
            self._tasks.extendleft(reversed([refused.task for refused in self._refused]))
            self._refused.clear()
            self._tasks.append(barrier)
            self._changed.notify_all()
        barrier.reached.wait()
        unsynced = self._sync_deletions()
        with self._changed:
            return unsynced + [each.error for each in self._refused if each.concerns(ids)]

    def has_refused(self, ids: Collection[PageId] | None = None) -> bool:
        """Return whether a task of these pages, or of any, was refused and waits for a retry."""
        with self._changed:
            return any(refused.concerns(ids) for refused in self._refused)

    def close(self) -> None:
        """Finish all tasks and stop the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _sync_deletions(self) -> list[KvStoreError]:
        """Sync the deletions so far; the writer goes on meanwhile."""
        with self._changed:
            deletions = self._deletions
            if deletions == self._synced_deletions:
                return []
        try:
            self._callbacks.sync_deletions()
        except KvStoreError as error:
            return [error]
        with self._changed:
            self._synced_deletions = max(self._synced_deletions, deletions)
        return []

    def _run(self) -> None:
        while (task := self._next_task()) is not None:
            if isinstance(task, _Barrier):
                self._flush_pending(task)
            else:
                self._attempt(task)

    def _next_task(self) -> _Task | None:
        with self._changed:
            while not self._tasks:
                if self._closed:
                    return None
                self._changed.wait()
            return self._tasks.popleft()

    def _flush_pending(self, barrier: _Barrier) -> None:
        try:
            self._callbacks.flush_pending(barrier.ids)
        except Exception:
            # The thread must survive. The pages stay pending, so a flush reports them.
            self._callbacks.on_refused()
        finally:
            barrier.reached.set()

    def _attempt(self, task: QueuedPage | _Deletion) -> None:
        try:
            if isinstance(task, _Deletion):
                self._delete(task)
            elif self._queued.get(task.id) is task:
                self._callbacks.write(task)
        except KvStoreError as error:
            self._keep_refused(task, error)
        except Exception as error:
            # The thread must survive, and a flush must report the error.
            failure = TierFailedError(f"writing pages failed: {error!r}")
            failure.__cause__ = error
            self._keep_refused(task, failure)
        else:
            self._finish(task)

    def _delete(self, task: _Deletion) -> None:
        with self._changed:
            wanted = frozenset(task.ids)
        # Who holds a page that moves reads it from where it lies now.
        taken = nullcontext(wanted) if task.held else self._holders.deleting(wanted)
        with taken as free:
            with self._changed:
                # From now on nobody submits one of them.
                task.ids &= free
                if not task.everywhere:
                    task.ids -= self._queued.keys()
                for page_id in task.ids:
                    self._queued.pop(page_id, None)
                ids = frozenset(task.ids)
            if ids:
                task.run(ids)

    def _finish(self, task: QueuedPage | _Deletion) -> None:
        with self._changed:
            if isinstance(task, _Deletion):
                self._deletions += bool(task.ids)
            elif self._queued.get(task.id) is task:
                del self._queued[task.id]
            self._changed.notify_all()

    def _keep_refused(self, task: QueuedPage | _Deletion, error: KvStoreError) -> None:
        with self._changed:
            if isinstance(task, _Deletion):
                # A later deletion would remove the pages that were submitted since then.
                task.ids -= self._queued.keys()
            elif self._queued.get(task.id) is not task:
                return  # discarded since
            self._refused.append(_Refused(task, error))
            self._changed.notify_all()
        self._callbacks.on_refused()

    def _add_deletion(self, deletion: _Deletion) -> None:
        if not deletion.ids:
            return
        with self._changed:
            self._require_open()
            self._tasks.append(deletion)
            self._changed.notify_all()

    def _cancel_deletions(self, page_id: PageId) -> None:
        """Remove a page from deletions that wait: they would delete what is written now."""
        for task in [*self._tasks, *(refused.task for refused in self._refused)]:
            if isinstance(task, _Deletion):
                task.ids.discard(page_id)

    def _require_open(self) -> None:
        if self._closed:
            raise StoreClosedError("the row store is closed")
