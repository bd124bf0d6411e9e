"""Row store: every row of every session, written once, gathered by position, kept over restarts.

Rows are appended to a page in memory. A full page is queued for the writer thread, which writes it to
the tiers. `flush` waits until all pages of a session are durable. Rows behind the last full page are in
memory alone, and end with the process.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future

from torch import Tensor

from kvstore.consistency import check_store
from kvstore.errors import KvStoreError, RowRangeError, RowShapeError
from kvstore.format.codec import Codec
from kvstore.format.commit_history import CommitHistory
from kvstore.format.gather import ReadKeys, split_by_page
from kvstore.format.page import PageLayout
from kvstore.format.page_table import PageTable, PageVersion, SharedPages
from kvstore.hierarchy.epochs import WriterEpochs
from kvstore.hierarchy.group_commit import then
from kvstore.hierarchy.metered import CallObserver, TierStatus
from kvstore.hierarchy.retry import BackoffRetry
from kvstore.hierarchy.tier_stack import TierStack
from kvstore.hierarchy.write_through import WriteThrough
from kvstore.sessions.context import StoreContext
from kvstore.sessions.directory import SessionDirectory
from kvstore.sessions.opener import SessionOpener, Versions, find_stored_sessions
from kvstore.sessions.prefetcher import Prefetcher
from kvstore.sessions.reader import RowReader
from kvstore.sessions.remover import SessionRemover
from kvstore.sessions.writer import RowWriter
from kvstore.tiers.base import UNFENCED, Tier
from kvstore.tiers.ram import RamTier


class RowStore:
    """All rows of all sessions over a hierarchy of tiers. Safe to call from several threads.

    A session is opened (`open`) under an epoch before it is written. One that was never opened is
    written under epoch 0; in tiers that only this process writes, it has the rows that they hold.

    With INT8 in the lowest tier, the rows of a page change once, in the `append` that finishes it:
    from then on every reader gets the decoded rows. An unfinished page is exact.

    Args:
        layout: Shape, dtype and fingerprint of the rows.
        tiers: Fastest first; the store closes them. The last one is authoritative.
        backlog_pages: Most full pages that wait for the writer; beyond it `append` waits.
        read_batch_pages: Most pages that one gather holds in memory at a time.
        codecs: One per tier (see `PagePlacement`); RAW for all by default.
        on_call: Called with the tier, the kind and the seconds of every call, on its thread.

    Raises:
        ForeignPageError: A tier holds pages of another layout.
        TierSettingsError: The tiers or codecs do not fit together.
    """

    def __init__(
        self,
        layout: PageLayout,
        tiers: Sequence[Tier],
        *,
        backlog_pages: int = 64,
        read_batch_pages: int = 16,
        codecs: Sequence[Codec] | None = None,
        on_call: CallObserver | None = None,
    ) -> None:
        self._layout = layout
        self._epochs = WriterEpochs()
        retry = BackoffRetry(lambda: self._through.retry_refused())
        self._stack = TierStack(layout, tiers, codecs, self._epochs, retry.wake, on_call)
        try:
            stored = find_stored_sessions(self._stack)
        except KvStoreError:
            self._stack.tiers.close()
            raise
        self._through = WriteThrough(self._stack, self._epochs, retry, backlog_pages)
        self._context = StoreContext(layout, self._stack, self._through.writer, self._epochs)
        self._reader = RowReader(self._context, read_batch_pages)
        self._rows = RowWriter(self._context, self._reader)
        self._opener = SessionOpener(self._context, self._rows, self._get_versions)
        self._sessions = SessionDirectory(stored, self._opener.recover)
        self._remover = SessionRemover(self._context, self._sessions)
        self._prefetcher = Prefetcher(self._context, self._sessions)

    @property
    def layout(self) -> PageLayout:
        """Shape, dtype and fingerprint of the rows."""
        return self._layout

    @property
    def row_layout(self) -> bytes:
        """All that a stored row depends on beside its tokens: model, shape, dtype and lowest codec."""
        return f"{self._layout!r} {self._stack.placement.lowest_codec.name}".encode()

    @property
    def memory(self) -> RamTier | None:
        """The RAM tier, in which readers reserve what they keep; None for a store without one on top."""
        return self._stack.tiers.memory

    def open(
        self,
        session: str,
        *,
        epoch: int,
        length: int,
        shared: Sequence[SharedPages] = (),
        history: CommitHistory | None = None,
        dropped: Sequence[range] = (),
    ) -> None:
        """Open the session with exactly `length` rows, written under `epoch` from now on.

        `dropped` are the numbers of written pages that it has no more; `shared` and `history` count
        them as well. The first rows are in pages that other sessions wrote (`shared`). Rows beyond `length` are
        deleted when this returns. Pages that are not found, or that `history` does not commit, are
        missing (`missing_pages`): reading them raises MissingPageError until `restore` writes them
        again. Without a history, pages of this epoch and the one before count as committed.

        Raises StaleWriterError when the session was opened under a later epoch, in any process;
        RowRangeError for a length inside a page or within the shared pages; a tier's error when the
        lowest tier does not answer and memory alone is not sufficient.
        """
        with self._sessions.locked(session, create=True, recover=False) as state:
            self._opener.open(state, epoch, length, shared, history, dropped=dropped)
            owners = state.table.owners
        self._through.renew(owners)

    def fork(
        self,
        parent: str,
        child: str,
        *,
        epoch: int,
        length: int,
        shared: Sequence[SharedPages],
        dropped: Sequence[range] = (),
    ) -> None:
        """Open `child` with the first `length` rows of `parent`, whose pages are referenced (`shared`).

        Raises as `open`, RowRangeError when the parent has fewer rows, and MissingPageError.
        """
        table = PageTable(child, shared, dropped=dropped)
        with self._sessions.locked(parent) as state:
            owner_versions = self._opener.get_fork_versions(state, table, length)
        with self._sessions.locked(child, create=True, recover=False) as state:
            self._opener.open(
                state, epoch, length, shared, owner_versions=owner_versions, dropped=dropped
            )

    def delete(self, session: str, *, keep_pages: int = 0, fence: int = UNFENCED) -> None:
        """Delete a session from every tier, except its own first `keep_pages` pages (for forks).

        Unknown sessions and epochs are ignored. Shared tiers refuse later writes under epochs
        before `fence`: by default no epoch writes the session again. Failed deletions are retried
        in the background. Raises a tier's error when it cannot list the session's pages, and
        StaleWriterError when a shared tier has a later fence.
        """
        self.begin_delete(session, keep_pages=keep_pages, fence=fence).result()

    def begin_delete(
        self, session: str, *, keep_pages: int = 0, fence: int = UNFENCED
    ) -> "Future[None]":
        """Begin to `delete` a session, which is unknown from now on.

        Deletions that are waited for at the same time share one sync. Raises as `delete`.
        """
        self._remover.delete(session, keep_pages, fence)
        return then(self._through.flush([session]), lambda _: None)

    def unclaimed(self, after: str = "", limit: int | None = None) -> list[str]:
        """Sessions of an earlier process that were not opened or appended to since, sorted.

        Up to `limit` of those whose ids follow `after`.
        """
        return self._sessions.unclaimed(after, limit)

    def delete_unclaimed(self, session: str, *, keep_pages: int = 0) -> bool:
        """Delete a session of an earlier process, except its first `keep_pages` pages (for forks).

        Returns False when it was opened, appended to or deleted since. Shared tiers are not
        changed. Raises a tier's error when it cannot list the session's pages.
        """
        deleted = self._remover.delete_unclaimed(session, keep_pages)
        if deleted:
            self._through.flush([session]).result()
        return deleted

    def release(self, session: str) -> None:
        """Remove a session that continues in another process from memory.

        Above a shared lowest tier its copies are deleted too, except pages that are pending.
        """
        self._remover.release(session)

    def unload(self, session: str) -> None:
        """Forget what memory has of an idle session; its pages stay in all tiers.

        The next `open`, or in unshared tiers the next read, loads it again. Nothing happens while
        some of its rows are in memory alone.
        """
        self._remover.unload(session)

    def sessions(self) -> list[str]:
        """Ids of sessions that are open or were found in unshared tiers, sorted."""
        return self._sessions.names()

    def append(self, session: str, rows: Tensor, *, final: bool = True) -> int:
        """Append rows `[n_layers, 2, n_kv_heads, t, head_dim]` (copied); return the new length.

        Rows that are not `final` are never written: they, and all that follow them, are in memory
        until `truncate` removes them.

        The first append creates the session. Raises RowShapeError, StaleWriterError when another
        writer has taken the session over, or a tier's error when no tier accepts pages and the
        backlog is full; then no row was appended.
        """
        self._rows.require_rows(rows)
        with self._sessions.locked(session, create=True) as state:
            state.loaded = True
            self._rows.append(state, rows, final=final)
            return state.length

    def length(self, session: str) -> int:
        """Number of tokens whose rows the session has; 0 for an unknown session."""
        loaded = self._sessions.get_loaded(session)
        if loaded is not None:
            return loaded.length
        with self._sessions.locked(session) as state:
            return state.length

    def truncate(self, session: str, length: int) -> None:
        """Cut the session to its first `length` rows: whole pages, all of them final.

        Raises RowRangeError for any other length, and when shared pages would be cut.
        """
        with self._sessions.locked(session) as state:
            self._rows.truncate(state, length)

    def drop(self, session: str, length: int) -> None:
        """Let the session go on behind its first `length` rows: whole pages, all of them final.

        The pages behind them stay stored, for the sessions that share them, and for openings of the
        session as it was. Raises RowRangeError for any other length.
        """
        with self._sessions.locked(session) as state:
            self._rows.drop(state, length)

    def drop_page(self, session: str, index: int) -> None:
        """Delete one of a session's own pages: it is missing from now on, as one that was lost."""
        with self._sessions.locked(session) as state:
            if not (index < len(state.table) and state.table.shared_entry(index) is None):
                raise RowRangeError(f"session {session!r} has no page {index} of its own")
            self._rows.drop_page(state, index)

    def flush(self, session: str) -> bool:
        """Write all pages of the session; return whether they are in a durable tier.

        If not, their rows stay readable in memory; every later flush and the background retry try
        again. Raises StaleWriterError when another writer has taken the session over.
        """
        return self.begin_flush(session).result()

    def begin_flush(self, session: str) -> "Future[bool]":
        """Begin to `flush`: everything appended so far is covered.

        Flushes that are waited for at the same time share one sync of each tier.
        """
        with self._sessions.locked(session) as state:
            self._epochs.require_writable(session, state.epoch)
            epoch = state.epoch
            owners = state.table.owners

        def finish(durable: bool) -> bool:
            self._epochs.require_writable(session, epoch)
            return durable

        return then(self._through.flush(owners), finish)

    def missing_pages(self, session: str) -> list[int]:
        """Indices of the pages that were not found when the session was opened; reads nothing."""
        with self._sessions.locked(session) as state:
            return state.table.missing()

    def repair_pages(self, session: str) -> list[int]:
        """Read and verify every page, shared ones too; return the indices of the missing ones.

        A page of which only a copy in a faster tier is intact is written again to the tier that
        must hold it; `flush` returns once it is there. Raises a tier's error when it does not
        answer, since its pages are not missing, and StaleWriterError.
        """
        with self._sessions.locked(session) as state:
            return self._rows.repair_pages(state)

    def restore(self, session: str, index: int, rows: Tensor) -> None:
        """Write a missing page again: all its rows `[n_layers, 2, n_kv_heads, t, head_dim]`.

        A shared page is restored for all sessions that share it. Raises RowShapeError,
        RowRangeError, StaleWriterError.
        """
        with self._sessions.locked(session) as state:
            self._rows.restore(state, index, rows)

    def gather(self, session: str, positions: Tensor) -> Tensor:
        """Gather positions int64 `[m]` as rows `[n_layers, 2, n_kv_heads, m, head_dim]`.

        Raises RowRangeError for a position that the session does not have, and a PageError when a
        page is corrupt, foreign or missing.
        """
        with self._sessions.locked(session) as state:
            return self._reader.gather(state, positions)

    def gather_heads(self, session: str, layer: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Gather one layer with positions per KV head, int64 `[n_kv_heads, m]`.

        Returns keys and values `[n_kv_heads, m, head_dim]`, zeros for -1. Raises as `gather`.
        """
        with self._sessions.locked(session) as state:
            return self._reader.gather_layers(state, [positions], range(layer, layer + 1))[0]

    def gather_selection(
        self, session: str, selection: Sequence[Tensor], *, promote: bool = True
    ) -> list[tuple[Tensor, Tensor]]:
        """Gather a selection, per layer int64 `[n_kv_heads, m_l]`, reading each page once.

        Returns per layer keys and values `[n_kv_heads, m_l, head_dim]`; position -1 yields zeros.
        `promote`: copy pages into the tiers above the one that had them. Raises as `gather`, and
        RowShapeError unless there is one entry per layer.
        """
        if len(selection) != (layers := self._layout.n_layers):
            raise RowShapeError(
                f"a selection must have one entry per layer ({layers}), got {len(selection)}"
            )
        with self._sessions.locked(session) as state:
            return self._reader.gather_layers(state, selection, range(layers), promote=promote)

    def gather_side(self, session: str, start: int, stop: int) -> Tensor:
        """Gather the rows of side layers at positions start..stop-1.

        Returns `[side_layers, parts, n_kv_heads, stop - start, head_dim]`. Raises as `gather`.
        """
        with self._sessions.locked(session) as state:
            return self._reader.gather_side(state, start, stop)

    def scan_keys(
        self, session: str, start: int = 0, stop: int | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield the keys of positions start..stop-1 page by page.

        Each item is the first position and a copy `[n_layers, n_kv_heads, t, head_dim]`. Nothing is
        promoted between tiers. Raises as `gather`.
        """
        length = self.length(session)
        stop = length if stop is None else stop
        if not 0 <= start <= stop <= length:
            raise RowRangeError(
                f"the scanned range must lie in 0..{length} of session {session!r}, "
                f"got {start}..{stop}"
            )
        for begin, end in split_by_page(start, stop, self._layout.page_tokens):
            with self._sessions.locked(session) as state:
                keys = self._reader.keys_between(state, begin, end)
            yield begin, keys

    def read_keys(self, session: str, pages: Sequence[int]) -> ReadKeys:
        """Read the keys of pages by index; nothing is promoted between tiers. Raises as `gather`."""
        with self._sessions.locked(session) as state:
            return self._reader.read_keys(state, pages)

    def page_versions(self, session: str, pages: Sequence[int]) -> list[PageVersion]:
        """Versions of pages by index, of which the last ones may be in memory alone; reads nothing.

        Raises RowRangeError for a page that the session does not have.
        """
        with self._sessions.locked(session) as state:
            self._reader.require_pages(state, pages)
            return [state.table.version(index) for index in pages]

    def hold_pages(self, session: str, pages: Sequence[int]) -> list[Tensor]:
        """Read pages whole, `[page_layers, parts, n_kv_heads, page_tokens, head_dim]`, to be kept.

        They are views of the RAM tier where it has them, whose memory is not used for others
        meanwhile. A page that is not full has any numbers behind its rows. Raises as `gather`.
        """
        with self._sessions.locked(session) as state:
            return self._reader.hold(state, pages)

    def prefetch(self, session: str) -> None:
        """Begin to copy the session's last pages into memory, up to half of what is not reserved there."""
        self._prefetcher.request(session)

    def usage(self) -> dict[str, int]:
        """Bytes of the pages in each tier, headers included, by the tier's name."""
        return self._stack.tiers.used_bytes()

    def failures(self) -> dict[str, str]:
        """Reasons of the tiers that fail now, by their names; empty when all work."""
        return self._stack.tiers.failures()

    def tiers(self) -> dict[str, TierStatus]:
        """Contents and activity of each tier, by the tier's name."""
        return self._stack.tiers.get_status()

    def count_pending(self) -> tuple[int, int]:
        """Count the pages that are not in the lowest tier, and those of them in memory alone."""
        return self._stack.placement.count_pending()

    def check(self) -> None:
        """Finish all background work, then raise InvariantError unless tiers and tables agree.

        In a shared lowest tier only sessions that are open here. Raises a tier's error when no
        tier accepts a page.
        """
        self._through.finish()
        self._prefetcher.finish()
        self._stack.tiers.check()
        check_store(self._context, self._sessions)

    def close(self) -> None:
        """Flush every page, then close the tiers, even when the flush fails.

        May be called twice. Raises a tier's error when rows are in no durable tier.
        """
        if not self._sessions.close():
            return
        self._prefetcher.close()
        self._through.close()

    def _get_versions(self, session: str) -> Versions | None:
        return self._sessions.get_versions(session)
