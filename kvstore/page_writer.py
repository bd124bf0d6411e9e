"""The thread that brings pages to the tiers, so that no caller waits for a disk unless it asks to.

Pages on their way stay readable here until the tiers have them. What a tier refuses is kept and reported by
`drain`, which also tries it again; nothing that was handed over is lost while the process lives.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from threading import Condition, Event, Thread

from torch import Tensor

from kvstore.errors import KvStoreError, StoreClosedError, TierFailedError
from kvstore.page import Blob, PageKey
from kvstore.tier_stack import ExpectedPage


@dataclass(frozen=True, eq=False)
class PendingPage:
    """A page on its way. Its rows `[n_layers, 2, n_kv_heads, t, head_dim]` are contiguous and never change.

    blob: what they were decoded from, where encoding changed them; None where the rows say everything.
    """

    page: ExpectedPage
    rows: Tensor
    blob: Blob | None = None


@dataclass(frozen=True, eq=False)
class _Deletion:
    keys: tuple[PageKey, ...]


@dataclass(frozen=True, eq=False)
class _Barrier:
    reached: Event = field(default_factory=Event)


_Task = PendingPage | _Deletion | _Barrier


@dataclass(frozen=True)
class _Refused:
    task: PendingPage | _Deletion
    error: KvStoreError

    def concerns(self, session: str | None) -> bool:
        keys = self.task.keys if isinstance(self.task, _Deletion) else (self.task.page.key,)
        return session is None or any(key.session == session for key in keys)


class PageWriter:
    """Writes pages and deletes them in the order they were handed over, in one thread of its own."""

    def __init__(self, write: Callable[[PendingPage], None],
                 delete: Callable[[Sequence[PageKey]], None], backlog_pages: int) -> None:  # fmt: skip
        self._write = write
        self._delete = delete
        self._backlog_pages = backlog_pages
        self._changed = Condition()
        self._tasks: deque[_Task] = deque()
        self._pending: dict[PageKey, PendingPage] = {}
        self._refused: list[_Refused] = []
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

    def submit(self, pending: PendingPage) -> None:
        """Hand a page over; it replaces an earlier version that is still on its way."""
        with self._changed:
            self._require_open()
            self._forget_refused_deletion(pending.page.key)
            self._pending[pending.page.key] = pending
            self._tasks.append(pending)
            self._changed.notify_all()

    def discard(self, keys: Sequence[PageKey]) -> None:
        """Stop pages that are on their way and delete them from the tiers."""
        if not keys:
            return
        with self._changed:
            self._require_open()
            for key in keys:
                self._pending.pop(key, None)
            self._tasks.append(_Deletion(tuple(keys)))
            self._changed.notify_all()

    def pending(self, key: PageKey) -> PendingPage | None:
        """The page if it is still on its way. None means that the tiers have it (or it was discarded)."""
        return self._pending.get(key)

    def drain(self, session: str | None = None) -> None:
        """Return when everything handed over so far was done; what was refused before is tried once more.

        Raises the first tier error that concerns the session (or any session).
        """
        barrier = _Barrier()
        with self._changed:
            self._require_open()
            self._tasks.extendleft(reversed([refused.task for refused in self._refused]))
            self._refused.clear()
            self._tasks.append(barrier)
            self._changed.notify_all()
        barrier.reached.wait()
        with self._changed:
            for refused in self._refused:
                if refused.concerns(session):
                    raise refused.error

    def close(self) -> None:
        """Finish what was handed over and stop the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while (task := self._next_task()) is not None:
            if isinstance(task, _Barrier):
                task.reached.set()
            else:
                self._attempt(task)

    def _next_task(self) -> _Task | None:
        with self._changed:
            while not self._tasks:
                if self._closed:
                    return None
                self._changed.wait()
            return self._tasks.popleft()

    def _attempt(self, task: PendingPage | _Deletion) -> None:
        try:
            if isinstance(task, _Deletion):
                self._delete(task.keys)
            elif self._pending.get(task.page.key) is task:
                self._write(task)
        except KvStoreError as error:
            self._keep_refused(task, error)
        except Exception as error:  # The thread must live, and whoever flushes must hear of it.
            failure = TierFailedError(f"writing pages failed: {error!r}")
            failure.__cause__ = error
            self._keep_refused(task, failure)
        else:
            self._finish(task)

    def _finish(self, task: PendingPage | _Deletion) -> None:
        with self._changed:
            if isinstance(task, PendingPage) and self._pending.get(task.page.key) is task:
                del self._pending[task.page.key]
            self._changed.notify_all()

    def _keep_refused(self, task: PendingPage | _Deletion, error: KvStoreError) -> None:
        with self._changed:
            if isinstance(task, _Deletion):
                # A page handed over since then replaces the old one; deleting later would take the new one.
                task = _Deletion(tuple(key for key in task.keys if key not in self._pending))
            self._refused.append(_Refused(task, error))
            self._changed.notify_all()

    def _forget_refused_deletion(self, key: PageKey) -> None:
        """The page is replaced, so deleting what it replaces would be late: it would take the new one."""
        for i, refused in enumerate(self._refused):
            if isinstance(refused.task, _Deletion) and key in refused.task.keys:
                task = _Deletion(tuple(other for other in refused.task.keys if other != key))
                self._refused[i] = replace(refused, task=task)

    def _require_open(self) -> None:
        if self._closed:
            raise StoreClosedError("the row store is closed")
