"""A worker's way to its row store: what is written goes one after the other, what is read comes beside it.

No forward pass waits for a disk or a server here; whoever needs a result is given its future.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from kvrecall.protocol.v1 import worker_pb2 as wire
from kvstore.errors import KvStoreError, PageError, RowRangeError, StaleWriterError
from kvstore.format.page_table import SharedPages
from kvstore.store import RowStore
from workers.engine.session import WorkerSession
from workers.errors import RowsMissing, StaleEpoch, StorageFailed

_T = TypeVar("_T")
_WAITING_WRITES = 16


@contextmanager
def storage() -> Iterator[None]:
    """Turn the row store's errors into this package's: the one place where they enter it."""
    try:
        yield
    except StaleWriterError as error:
        raise StaleEpoch(f"another worker has taken the session over: {error}") from error
    except (PageError, RowRangeError) as error:
        raise RowsMissing(f"rows that were committed cannot be read: {error}") from error
    except KvStoreError as error:
        raise StorageFailed(f"the row store failed: {error}") from error


class StoreIO:
    """Writes and reads of one worker's sessions. Its futures raise StorageFailed, RowsMissing and StaleEpoch."""

    def __init__(self, store: RowStore) -> None:
        self._store = store
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="write-through")
        self._reader = ThreadPoolExecutor(2, thread_name_prefix="swap-in")

    def do(self, work: Callable[[], _T]) -> "Future[_T]":
        """Do something with the store after all that is on its way there."""
        return self._writer.submit(_told, work)

    def append(self, session: WorkerSession, start: int, rows: Tensor) -> None:
        """Write a session's rows `[n_layers, 2, n_kv_heads, t, head_dim]` from position `start` on, in their turn.

        The copy off the device waits there, not here.
        """
        session.writes = [write for write in session.writes if not _succeeded(write)]
        session.writes.append(self.do(partial(self._append, session.name, start, rows)))

    def _append(self, session: str, start: int, rows: Tensor) -> None:
        # After a write that failed none may follow: its rows would take the lost ones' positions.
        if (stored := self._store.length(session)) != start:
            raise StorageFailed(
                f"session {session}: rows from {start} on cannot follow the {stored} that are stored"
            )
        self._store.append(session, rows.cpu())

    def backlog(self, session: WorkerSession) -> "Future[Any] | None":
        """The write to wait for when too many wait already: the rows of each hold device memory until it is done."""
        waiting = [write for write in session.writes if not write.done()]
        return waiting[-_WAITING_WRITES] if len(waiting) >= _WAITING_WRITES else None

    def flush(self, session: WorkerSession) -> "Future[bool]":
        """Begin to make every row that was said durable; `settle` once it is done says whether it was."""
        flushed = self.do(lambda: self._store.flush(session.name))
        session.writes.append(flushed)
        return flushed

    def settle(self, session: WorkerSession) -> bool:
        """Wait until every row that was said is in the store: whether it is durable there, where that was asked for."""
        writes = session.writes
        session.writes = []
        results = [write.result() for write in writes]
        return all(result is not False for result in results)

    def fetch(self, session: WorkerSession) -> "Future[Any] | None":
        """Begin to read the rows of a session that is to be seated; None if it needs none."""
        selection = session.selection
        if session.slot is None and selection is not None and session.arriving is None:
            read = partial(self._store.gather_selection, session.name, selection.places())
            session.arriving = self._reader.submit(_told, read)
        return session.arriving

    def close(self) -> None:
        """Finish what is on its way."""
        self._reader.shutdown()
        self._writer.shutdown()


def shared_pages(spec: wire.SessionSpec) -> list[SharedPages]:
    """Whose pages a session begins with."""
    return [SharedPages(shared.owner, shared.pages) for shared in spec.shared]


def _told(work: Callable[[], _T]) -> _T:
    with storage():
        return work()


def _succeeded(write: "Future[Any]") -> bool:
    return write.done() and not write.cancelled() and write.exception() is None
