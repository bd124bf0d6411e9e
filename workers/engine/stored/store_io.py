"""A worker's I/O with its row store: writes in order on one thread, reads on two others.

No forward pass waits for a disk or a server, and no session's write waits until another session's
rows are durable. Results are futures.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from kvrecall.domain.page_ids import PageId
from kvstore.errors import KvStoreError, PageError, RowRangeError
from workers.cache.side_cache import SideCache
from workers.cache.transfers import Transfers
from workers.engine.session import WorkerSession
from workers.engine.snapshots import Snapshot
from workers.engine.stored.stored_sessions import StoredSessions
from workers.errors import RowsMissing, StorageFailed

_T = TypeVar("_T")
# Writes of one session in flight before the session waits: their rows hold device memory.
_MAX_PENDING_WRITES = 16
_CPU = torch.device("cpu")


@contextmanager
def map_store_errors() -> Iterator[None]:
    """Map the row store's errors to this package's: the only place where they enter it."""
    try:
        yield
    except (PageError, RowRangeError) as error:
        raise RowsMissing(f"rows that were committed cannot be read: {error}") from error
    except KvStoreError as error:
        raise StorageFailed(f"the row store failed: {error}") from error


@dataclass(frozen=True, eq=False)
class SlotContent:
    """All that a slot needs of a session.

    Attributes:
        rows: Per layer keys and values of the selection, `[n_kv_heads, m, head_dim]`.
        windows: Rows of windows `[side_layers, parts, n_kv_heads, t, head_dim]`, the last ones; None
            without such layers.
        state: Recurrent states, uint8; None without such layers.
    """

    rows: list[tuple[Tensor, Tensor]]
    windows: Tensor | None = None
    state: Tensor | None = None


class StoreIO:
    """Writes and reads of one worker's sessions.

    Its futures raise StorageFailed and RowsMissing.
    """

    def __init__(
        self,
        stored: StoredSessions,
        transfers: Transfers | None = None,
        side: SideCache | None = None,
    ) -> None:
        """Create the threads.

        transfers: of the device that the rows are computed on; None: the CPU. side: of a model with
        layers that keep other things than managed rows.
        """
        self._stored = stored
        self._store = stored.rows
        self._side = side
        self._transfers = transfers or Transfers(_CPU)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="write-through")
        self._reader = ThreadPoolExecutor(2, thread_name_prefix="swap-in")

    def submit(self, work: Callable[[], _T]) -> "Future[_T]":
        """Run `work` on the writer's thread, after all writes that were submitted before."""
        return self._writer.submit(_run_mapping_errors, work)

    def submit_durable(self, begin: Callable[[], "Future[_T]"]) -> "Future[_T]":
        """Run `begin` as `submit`, then wait for its result without occupying the writer's thread.

        So that sessions whose flushes and deletions wait for a disk at the same time share one
        sync of it.
        """
        result = Future[_T]()

        def run() -> None:
            if not result.set_running_or_notify_cancel():
                return
            try:
                begun = _run_mapping_errors(begin)
            except Exception as error:
                result.set_exception(error)
            else:
                begun.add_done_callback(partial(_copy_result, result))

        self._writer.submit(run)
        return result

    def append(
        self,
        session: WorkerSession,
        start: int,
        rows: Tensor,
        pages: Sequence[PageId],
        *,
        final: bool,
    ) -> None:
        """Queue the write of rows `[n_layers, 2, n_kv_heads, t, head_dim]` from `start` on.

        pages: ids of those that they fill. Rows that are not `final` stay in memory.
        The copy off the device happens on the writer's thread.
        """
        session.writes = [write for write in session.writes if not _succeeded(write)]
        computed = self._transfers.mark()
        append = partial(self._append, session.name, start, rows, tuple(pages), computed, final)
        session.writes.append(self.submit(append))

    def append_state(self, session: WorkerSession, snapshot: Snapshot) -> None:
        """Queue the write of a recurrent state, the session's next one, after its last page."""
        assert self._side is not None, "a model with states"
        pool, name = self._side.states, session.name
        assert pool is not None, "a model with states"
        page = session.page_ids[snapshot.position // self._store.layout.page_tokens - 1]

        def append() -> None:
            self._stored.append_state(name, page, pool.pack(snapshot.state))

        session.writes.append(self.submit(append))

    def drop_state(self, session: WorkerSession, index: int) -> None:
        """Queue the removal of one of the session's recurrent states."""
        session.writes.append(self.submit(partial(self._stored.drop_state, session.name, index)))

    def truncate(self, session: WorkerSession, length: int) -> None:
        """Queue the removal of the rows from position `length` on, and of the states behind it."""
        states = len(session.snapshots)
        remove = partial(self._stored.truncate, session.name, length, states)
        session.writes.append(self.submit(remove))

    def _append(
        self,
        session: str,
        start: int,
        rows: Tensor,
        pages: Sequence[PageId],
        computed: torch.cuda.Event | None,
        final: bool,
    ) -> None:
        # After a failed write none may follow: its rows would take the lost rows' positions.
        if (stored := self._store.length(session)) != start:
            raise StorageFailed(
                f"session {session}: rows from {start} on cannot follow the {stored} stored rows"
            )
        on_host = self._transfers.to_host(rows, computed)
        self._store.append(session, on_host, pages, final=final)

    def backlog(self, session: WorkerSession) -> "Future[Any] | None":
        """The write to wait for while too many are pending; None otherwise."""
        pending = [write for write in session.writes if not write.done()]
        return pending[-_MAX_PENDING_WRITES] if len(pending) >= _MAX_PENDING_WRITES else None

    def flush(self, session: WorkerSession) -> "Future[bool]":
        """Begin to make every appended row durable; `wait_written` returns whether it became so."""
        flushed = self.submit_durable(lambda: self._stored.begin_flush(session.name))
        session.writes.append(flushed)
        return flushed

    def wait_written(self, session: WorkerSession) -> bool:
        """Wait until every appended row is in the store.

        Returns whether the rows are durable, where a flush was submitted. Raises the errors of the
        writes.
        """
        writes = session.writes
        session.writes = []
        results = [write.result() for write in writes]
        return all(result is not False for result in results)

    def fetch(self, session: WorkerSession) -> "Future[Any] | None":
        """Begin to read the rows for swapping a session in; None if it needs none.

        The first token waits for this read, so pages are copied into faster tiers by it only if a
        repair will read the rest of them next. Otherwise a `prefetch` behind the job does it.
        """
        selection = session.selection
        if session.slot is None and selection is not None and session.prefetched is None:
            session.prefetched = self.read_slot(
                session,
                selection.store_positions(),
                session.length,
                promote=session.config.repair_rows > 0,
            )
        return session.prefetched

    def read_slot(
        self,
        session: WorkerSession,
        positions: Sequence[Tensor],
        length: int,
        *,
        promote: bool = True,
    ) -> "Future[SlotContent]":
        """Begin to read what a slot needs of a session of `length` rows; positions: as `gather`."""
        name, snapshots = session.name, tuple(session.snapshots)

        def read() -> SlotContent:
            rows = self._store.gather_selection(name, positions, promote=promote)
            return SlotContent(
                rows,
                self._read_windows(name, length),
                self._read_state(name, length, snapshots),
            )

        return self._reader.submit(_run_mapping_errors, read)

    def _read_windows(self, session: str, length: int) -> Tensor | None:
        """Read the rows of windows that a query at position `length` sees."""
        if self._side is None or self._side.windows is None:
            return None
        return self._store.gather_side(session, self._side.first_position(length), length)

    def _read_state(self, session: str, length: int, snapshots: Sequence[int]) -> Tensor | None:
        """Read the recurrent states after `length` tokens."""
        if self._side is None or self._side.states is None or not length:
            return None
        nbytes = self._side.states.nbytes
        return self._stored.read_state(session, length, snapshots, nbytes)

    def read_pages(
        self, session: WorkerSession, pages: Sequence[PageId], positions: Tensor
    ) -> "Future[Tensor]":
        """Begin to read rows of pages of other sessions of the session's tenant, for it.

        positions: of the pages' rows, int64 `[m]`. The result is `[n_layers, parts, n_kv_heads, m, head_dim]`.
        """
        reader, key = f"remembered by {session.name}", session.config.page_key
        read = partial(self._stored.read_pages, reader, tuple(pages), key, positions)
        return self._reader.submit(_run_mapping_errors, read)

    def gather(
        self, session: str, positions: Sequence[Tensor], *, promote: bool = True
    ) -> "Future[list[tuple[Tensor, Tensor]]]":
        """Begin to read rows, per layer int64 `[n_kv_heads, m]`, -1 for none.

        The result is per layer keys and values `[n_kv_heads, m, head_dim]`.
        """
        read = partial(self._store.gather_selection, session, positions, promote=promote)
        return self._reader.submit(_run_mapping_errors, read)

    def close(self) -> None:
        """Finish all reads and writes."""
        self._reader.shutdown()
        self._writer.shutdown()


def _run_mapping_errors(work: Callable[[], _T]) -> _T:
    with map_store_errors():
        return work()


def _copy_result(result: "Future[_T]", done: "Future[_T]") -> None:
    try:
        result.set_result(_run_mapping_errors(done.result))
    except Exception as error:
        result.set_exception(error)


def _succeeded(write: "Future[Any]") -> bool:
    return write.done() and not write.cancelled() and write.exception() is None
