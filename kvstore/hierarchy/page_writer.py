"""Writer thread: brings pages to the tiers, so that callers do not wait for a disk.

Queued pages stay readable here until the tiers have them. Refused tasks are kept and tried again;
no submitted page is lost while the process lives, unless another writer takes the session over.
Then its queued pages are discarded, and the next write or flush raises StaleWriterError.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from threading import Condition, Event, Thread

from torch import Tensor

from kvstore.errors import KvStoreError, StaleWriterError, StoreClosedError, TierFailedError
from kvstore.format.page import Blob, PageKey
from kvstore.format.page_table import ExpectedPage
from kvstore.hierarchy.epochs import WriterEpochs


@dataclass(frozen=True, eq=False)
class QueuedPage:
    """A page that is submitted to be written.

    Attributes:
        page: Key and version of the page.
        rows: Rows `[n_layers, 2, n_kv_heads, t, head_dim]`, contiguous, never changed.
        blob: The encoded page when encoding changed the rows, else None.
        epoch: Epoch under which the page is written.
    """

    page: ExpectedPage
    rows: Tensor
    blob: Blob | None
    epoch: int


@dataclass(frozen=True, eq=False)
class _Deletion:
    session: str
    keys: tuple[PageKey, ...]
    epoch: int | None


@dataclass(frozen=True, eq=False)
class _Barrier:
    """Flushes the pending pages of `sessions` (None: of all), then sets `reached`."""

    sessions: Collection[str] | None
    reached: Event = field(default_factory=Event)


_Task = QueuedPage | _Deletion | _Barrier


@dataclass(frozen=True)
class _Refused:
    task: QueuedPage | _Deletion
    error: KvStoreError

    @property
    def session(self) -> str:
        return _get_session(self.task)


@dataclass(frozen=True)
class WriterCallbacks:
    """Operations of the writer thread.

    Attributes:
        write: Write a page to the tiers.
        delete: Delete pages under an epoch from the tiers.
        sync_deletions: Make the deletions so far durable; raises a tier's error.
        flush_pending: Move the pending pages of some sessions, or of all, to the lowest tier;
            returns the sessions that another writer took over.
        on_refused: Called when a task has to be tried again.
    """

    write: Callable[[QueuedPage], None]
    delete: Callable[[Sequence[PageKey], int | None], None]
    flush_pending: Callable[[Collection[str] | None], list[str]]
    sync_deletions: Callable[[], None]
    on_refused: Callable[[], None]


class PageWriter:
    """Writes and deletes pages in the order of submission, in a thread of its own."""

    def __init__(
        self, callbacks: WriterCallbacks, epochs: WriterEpochs, backlog_pages: int
    ) -> None:
        self._callbacks = callbacks
        self._epochs = epochs
        self._backlog_pages = backlog_pages
        self._changed = Condition()
        self._tasks: deque[_Task] = deque()
        self._queued: dict[PageKey, QueuedPage] = {}
        self._refused: list[_Refused] = []
        self._current: _Task | None = None
        self._deletions = 0
        self._unsynced: dict[str, int] = {}  # Number of the last deletion, by session.
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
                if self._refused:
                    raise self._refused[0].error
                self._changed.wait()

    def submit(self, queued: QueuedPage) -> None:
        """Queue a page; it replaces an earlier version that is still queued."""
        with self._changed:
            self._require_open()
            self._cancel_refused_deletion(queued.page.key)
            self._queued[queued.page.key] = queued
            self._tasks.append(queued)
            self._changed.notify_all()

    def delete(self, keys: Sequence[PageKey], epoch: int | None) -> None:
        """Discard queued pages of one session and delete these pages from the tiers."""
        if not keys:
            return
        with self._changed:
            self._require_open()
            for key in keys:
                self._queued.pop(key, None)
            self._tasks.append(_Deletion(keys[0].session, tuple(keys), epoch))
            self._changed.notify_all()

    def discard(self, session: str) -> None:
        """Discard a session's queued pages; pages in the tiers stay."""
        with self._changed:
            self._discard_pages(session, None)
            self._changed.notify_all()

    def get_queued(self, key: PageKey) -> QueuedPage | None:
        """The page while it is queued; None once the tiers have it or it was discarded."""
        return self._queued.get(key)

    def queued_keys(self, session: str) -> set[PageKey]:
        """Keys of the session's queued pages."""
        with self._changed:
            return {key for key in self._queued if key.session == session}

    def drain(self, sessions: Collection[str] | None = None) -> list[KvStoreError]:
        """Wait until all tasks submitted so far are done and refused ones were tried once more.

        Deletions are durable then. Returns the errors of tasks of these sessions (None: of all)
        that were refused again, and of deletions that are not durable.
        """
        barrier = _Barrier(sessions)
        with self._changed:
            self._require_open()
            self._tasks.extendleft(reversed([refused.task for refused in self._refused]))
            self._refused.clear()
            self._tasks.append(barrier)
            self._changed.notify_all()
        barrier.reached.wait()
        unsynced = self._sync_deletions(sessions)
        with self._changed:
            return unsynced + [
                refused.error
                for refused in self._refused
                if sessions is None or refused.session in sessions
            ]

    def has_refused(self, sessions: Collection[str] | None = None) -> bool:
        """Return whether a task of these sessions, or of any, was refused and waits for a retry."""
        with self._changed:
            return any(sessions is None or refused.session in sessions for refused in self._refused)

    def has_tasks(self, session: str) -> bool:
        """Return whether a task of the session is queued, running or refused."""
        with self._changed:
            tasks = [*self._tasks, *(refused.task for refused in self._refused), self._current]
            return any(
                not isinstance(task, _Barrier) and _get_session(task) == session
                for task in tasks
                if task
            )

    def close(self) -> None:
        """Finish all tasks and stop the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _sync_deletions(self, sessions: Collection[str] | None) -> list[KvStoreError]:
        """Sync all deletions if these sessions had any; the writer goes on meanwhile."""
        with self._changed:
            deletions = self._deletions
            if not any(sessions is None or session in sessions for session in self._unsynced):
                return []
        try:
            self._callbacks.sync_deletions()
        except KvStoreError as error:
            return [error]
        with self._changed:
            self._unsynced = {
                session: number for session, number in self._unsynced.items() if number > deletions
            }
        return []

    def _run(self) -> None:
        while (task := self._next_task()) is not None:
            if isinstance(task, _Barrier):
                self._flush_pending(task)
            else:
                self._attempt(task)

    def _next_task(self) -> _Task | None:
        with self._changed:
            self._current = None
            while not self._tasks:
                if self._closed:
                    return None
                self._changed.wait()
            self._current = self._tasks.popleft()
            return self._current

    def _flush_pending(self, barrier: _Barrier) -> None:
        try:
            for session in self._callbacks.flush_pending(barrier.sessions):
                self._discard_stale(session, None)
        except Exception:
            # The thread must survive. The pages stay pending, so a flush reports them.
            self._callbacks.on_refused()
        finally:
            barrier.reached.set()

    def _attempt(self, task: QueuedPage | _Deletion) -> None:
        try:
            if isinstance(task, _Deletion):
                self._callbacks.delete(task.keys, task.epoch)
                self._count_deletion(task.session)
            elif self._queued.get(task.page.key) is task:
                self._callbacks.write(task)
        except StaleWriterError:
            self._discard_stale(_get_session(task), task.epoch)
        except KvStoreError as error:
            self._keep_refused(task, error)
        except Exception as error:
            # The thread must survive, and a flush must report the error.
            failure = TierFailedError(f"writing pages failed: {error!r}")
            failure.__cause__ = error
            self._keep_refused(task, failure)
        else:
            self._finish(task)

    def _count_deletion(self, session: str) -> None:
        with self._changed:
            self._deletions += 1
            self._unsynced[session] = self._deletions

    def _discard_stale(self, session: str, epoch: int | None) -> None:
        """Discard the queued pages of a session that another writer took over."""
        epoch = self._epochs.current(session, epoch) or 0
        self._epochs.mark_stale(session, epoch)
        with self._changed:
            self._discard_pages(session, epoch)
            self._changed.notify_all()

    def _finish(self, task: QueuedPage | _Deletion) -> None:
        with self._changed:
            if isinstance(task, QueuedPage) and self._queued.get(task.page.key) is task:
                del self._queued[task.page.key]
            self._changed.notify_all()

    def _keep_refused(self, task: QueuedPage | _Deletion, error: KvStoreError) -> None:
        with self._changed:
            if isinstance(task, _Deletion):
                # A later deletion would remove the pages that were submitted since then.
                task = replace(
                    task, keys=tuple(key for key in task.keys if key not in self._queued)
                )
            self._refused.append(_Refused(task, error))
            self._changed.notify_all()
        self._callbacks.on_refused()

    def _cancel_refused_deletion(self, key: PageKey) -> None:
        """Remove a page from refused deletions: a retry would delete its replacement."""
        for i, refused in enumerate(self._refused):
            if isinstance(refused.task, _Deletion) and key in refused.task.keys:
                task = replace(
                    refused.task, keys=tuple(other for other in refused.task.keys if other != key)
                )
                self._refused[i] = replace(refused, task=task)

    def _discard_pages(self, session: str, epoch: int | None) -> None:
        """Discard queued pages of a session; with `epoch`, those of that epoch or earlier."""
        discarded = [
            key
            for key, queued in self._queued.items()
            if key.session == session and (epoch is None or queued.epoch <= epoch)
        ]
        for key in discarded:
            del self._queued[key]
        self._refused = [
            refused
            for refused in self._refused
            if isinstance(refused.task, _Deletion) or refused.task.page.key in self._queued
        ]

    def _require_open(self) -> None:
        if self._closed:
            raise StoreClosedError("the row store is closed")


def _get_session(task: QueuedPage | _Deletion) -> str:
    return task.page.key.session if isinstance(task, QueuedPage) else task.session
