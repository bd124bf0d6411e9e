"""The thread that brings pages to the tiers, so that no caller waits for a disk unless it asks to.

Pages on their way stay readable here until the tiers have them. What every tier refuses is kept and tried again;
nothing that was handed over is lost while the process lives, unless another writer has taken the session over: then its
pages are dropped here, and whoever goes on writing it is told.
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
    """A page on its way. Its rows `[n_layers, 2, n_kv_heads, t, head_dim]` are contiguous and never change.

    blob: what they were decoded from, where encoding changed them; None where the rows say everything. epoch: under
    which it is written. cut: the version before has rows that must not be read again.
    """

    page: ExpectedPage
    rows: Tensor
    blob: Blob | None
    epoch: int
    cut: bool = False


@dataclass(frozen=True, eq=False)
class _Deletion:
    session: str
    keys: tuple[PageKey, ...]
    epoch: int | None


@dataclass(frozen=True, eq=False)
class _Barrier:
    """Bring what the tiers owe of `sessions` (None: of all) where it belongs, then say so."""

    sessions: Collection[str] | None
    reached: Event = field(default_factory=Event)


_Task = QueuedPage | _Deletion | _Barrier


@dataclass(frozen=True)
class _Refused:
    task: QueuedPage | _Deletion
    error: KvStoreError

    @property
    def session(self) -> str:
        return _session(self.task)


@dataclass(frozen=True)
class Work:
    """What the writer's thread calls.

    `settle` brings what is owed of some sessions, or all, where it belongs, and returns those that another writer has
    taken over. `refused` is called when something has to be tried again.
    """

    write: Callable[[QueuedPage], None]
    delete: Callable[[Sequence[PageKey], int | None], None]
    settle: Callable[[Collection[str] | None], list[str]]
    refused: Callable[[], None]


class PageWriter:
    """Writes pages and deletes them in the order they were handed over, in one thread of its own."""

    def __init__(self, work: Work, epochs: WriterEpochs, backlog_pages: int) -> None:
        self._work = work
        self._epochs = epochs
        self._backlog_pages = backlog_pages
        self._changed = Condition()
        self._tasks: deque[_Task] = deque()
        self._pending: dict[PageKey, QueuedPage] = {}
        self._refused: list[_Refused] = []
        self._current: _Task | None = None
        self._closed = False
        self._thread = Thread(target=self._run, name="kvstore-page-writer", daemon=True)
        self._thread.start()

    def wait_for_room(self) -> None:
        """Return when the backlog is below its bound. Raises a tier's error if it is full of refused pages."""
        with self._changed:
            while len(self._pending) >= self._backlog_pages:
                self._require_open()
                if self._refused:
                    raise self._refused[0].error
                self._changed.wait()

    def submit(self, pending: QueuedPage) -> None:
        """Hand a page over; it replaces an earlier version that is still on its way."""
        with self._changed:
            self._require_open()
            self._forget_refused_deletion(pending.page.key)
            self._pending[pending.page.key] = pending
            self._tasks.append(pending)
            self._changed.notify_all()

    def discard(self, keys: Sequence[PageKey], epoch: int | None) -> None:
        """Stop pages of one session that are on their way and delete them from the tiers."""
        if not keys:
            return
        with self._changed:
            self._require_open()
            for key in keys:
                self._pending.pop(key, None)
            self._tasks.append(_Deletion(keys[0].session, tuple(keys), epoch))
            self._changed.notify_all()

    def forget(self, session: str) -> None:
        """Stop a session's pages that are on their way; what the tiers have stays."""
        with self._changed:
            self._drop_pages(session, None)
            self._changed.notify_all()

    def pending(self, key: PageKey) -> QueuedPage | None:
        """The page if it is still on its way. None means that the tiers have it (or it was discarded)."""
        return self._pending.get(key)

    def drain(self, sessions: Collection[str] | None = None) -> list[KvStoreError]:
        """Return when everything handed over so far was done, and what was refused before was tried once more.

        Returns why something of these sessions (or any) was refused again.
        """
        barrier = _Barrier(sessions)
        with self._changed:
            self._require_open()
            self._tasks.extendleft(reversed([refused.task for refused in self._refused]))
            self._refused.clear()
            self._tasks.append(barrier)
            self._changed.notify_all()
        barrier.reached.wait()
        with self._changed:
            return [
                refused.error
                for refused in self._refused
                if sessions is None or refused.session in sessions
            ]

    def refuses(self, sessions: Collection[str] | None = None) -> bool:
        """Whether something of these sessions, or any, was refused and waits to be tried again."""
        with self._changed:
            return any(sessions is None or refused.session in sessions for refused in self._refused)

    def is_busy_with(self, session: str) -> bool:
        """Whether something of the session is on its way, or refused."""
        with self._changed:
            tasks = [*self._tasks, *(refused.task for refused in self._refused), self._current]
            return any(
                not isinstance(task, _Barrier) and _session(task) == session
                for task in tasks
                if task
            )

    def close(self) -> None:
        """Finish what was handed over and stop the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while (task := self._next_task()) is not None:
            if isinstance(task, _Barrier):
                self._settle(task)
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

    def _settle(self, barrier: _Barrier) -> None:
        try:
            for session in self._work.settle(barrier.sessions):
                self._give_up(session, None)
        except (
            Exception
        ):  # The thread must live. What is owed stays owed, and whoever flushes sees that it is.
            self._work.refused()
        finally:
            barrier.reached.set()

    def _attempt(self, task: QueuedPage | _Deletion) -> None:
        try:
            if isinstance(task, _Deletion):
                self._work.delete(task.keys, task.epoch)
            elif self._pending.get(task.page.key) is task:
                self._work.write(task)
        except StaleWriterError:
            self._give_up(_session(task), task.epoch)
        except KvStoreError as error:
            self._keep_refused(task, error)
        except Exception as error:  # The thread must live, and whoever flushes must hear of it.
            failure = TierFailedError(f"writing pages failed: {error!r}")
            failure.__cause__ = error
            self._keep_refused(task, failure)
        else:
            self._finish(task)

    def _give_up(self, session: str, epoch: int | None) -> None:
        """Another writer has taken the session over: what is on its way is dropped."""
        epoch = self._epochs.now(session, epoch) or 0
        self._epochs.note_stale(session, epoch)
        with self._changed:
            self._drop_pages(session, epoch)
            self._changed.notify_all()

    def _finish(self, task: QueuedPage | _Deletion) -> None:
        with self._changed:
            if isinstance(task, QueuedPage) and self._pending.get(task.page.key) is task:
                del self._pending[task.page.key]
            self._changed.notify_all()

    def _keep_refused(self, task: QueuedPage | _Deletion, error: KvStoreError) -> None:
        with self._changed:
            if isinstance(task, _Deletion):
                # A page handed over since then replaces the old one; deleting later would take the new one.
                task = replace(
                    task, keys=tuple(key for key in task.keys if key not in self._pending)
                )
            self._refused.append(_Refused(task, error))
            self._changed.notify_all()
        self._work.refused()

    def _forget_refused_deletion(self, key: PageKey) -> None:
        """The page is replaced, so deleting what it replaces would be late: it would take the new one."""
        for i, refused in enumerate(self._refused):
            if isinstance(refused.task, _Deletion) and key in refused.task.keys:
                task = replace(
                    refused.task, keys=tuple(other for other in refused.task.keys if other != key)
                )
                self._refused[i] = replace(refused, task=task)

    def _drop_pages(self, session: str, epoch: int | None) -> None:
        """Forget pages of a session that are on their way, those written under `epoch` or before if it is given."""
        dropped = [
            key
            for key, pending in self._pending.items()
            if key.session == session and (epoch is None or pending.epoch <= epoch)
        ]
        for key in dropped:
            del self._pending[key]
        self._refused = [
            refused
            for refused in self._refused
            if isinstance(refused.task, _Deletion) or refused.task.page.key in self._pending
        ]

    def _require_open(self) -> None:
        if self._closed:
            raise StoreClosedError("the row store is closed")


def _session(task: QueuedPage | _Deletion) -> str:
    return task.page.key.session if isinstance(task, QueuedPage) else task.session
