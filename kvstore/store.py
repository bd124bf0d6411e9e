"""Row store: every row of every session, written once, gathered by position, kept over restarts.

Pages are stored under ids that say what they hold: an open session is a list of ids, and sessions that
begin alike have the same pages. Rows are appended to a page in
memory. A full page is queued for the writer thread, which writes it to the tiers. `flush` waits until
all pages of a session are durable. Rows behind the last full page are in memory alone, and end with the
process.
"""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import compress
from operator import or_

from torch import Tensor

from kvstore.consistency import check_store
from kvstore.errors import (
    KvStoreError,
    RowRangeError,
    RowShapeError,
    TierError,
    TierSettingsError,
)
from kvstore.format.codec import Codec
from kvstore.format.gather import ReadKeys, split_by_page
from kvstore.format.page import PageId, PageLayout, require_layout
from kvstore.hierarchy.group_commit import then
from kvstore.hierarchy.metered import CallObserver, TierStatus
from kvstore.hierarchy.page_holders import PageHolders
from kvstore.hierarchy.retry import BackoffRetry
from kvstore.hierarchy.tier_stack import TierStack
from kvstore.hierarchy.write_through import WriteThrough
from kvstore.sessions.context import StoreContext
from kvstore.sessions.directory import SessionDirectory
from kvstore.sessions.opener import SessionOpener
from kvstore.sessions.prefetcher import Prefetcher
from kvstore.sessions.presence import find_absent, find_restored
from kvstore.sessions.reader import RowReader
from kvstore.sessions.state import StoredSession
from kvstore.sessions.writer import RowWriter
from kvstore.settings import COLD_AFTER_SECONDS
from kvstore.tiers.base import Tier
from kvstore.tiers.bucket.tier import BucketTier
from kvstore.tiers.ram import RamTier

# The longest that a page in use goes without a renewal of its time to live, if that is much longer.
_KEEP_SECONDS = 600.0


class RowStore:
    """All rows of all sessions over a hierarchy of tiers. Safe to call from several threads.

    Which pages a session has, and which no session has any more, is known by whoever opens sessions:
    the store lists what it has (`list_pages`), and deletes what it is told to.

    With INT8 in the lowest tier, the rows of a page change once, in the `append` that finishes it:
    from then on every reader gets the decoded rows. An unfinished page is exact.

    Args:
        layout: Shape, dtype and fingerprint of the rows.
        tiers: Fastest first; the store closes them. The last one is authoritative.
        backlog_pages: Most full pages that wait for the writer; beyond it `append` waits.
        read_batch_pages: Most pages that one gather holds in memory at a time.
        codecs: One per tier (see `PagePlacement`); RAW for all by default.
        on_call: Called with the tier, the kind and the seconds of every call, on its thread.
        bucket: Where pages go that were not used for `cold_after_seconds`; the store closes it. Turns wait
            for it only if they read what lies there. The lowest tier must be this process's own.

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
        bucket: BucketTier | None = None,
        cold_after_seconds: float = COLD_AFTER_SECONDS,
    ) -> None:
        self._layout = layout
        retry = BackoffRetry(lambda: self._through.retry_refused())
        self._stack = TierStack(
            layout, tiers, codecs, retry.wake, on_call, bucket, cold_after_seconds
        )
        try:
            _require_own_lowest(tiers, bucket)
            _require_ours(layout, tiers)
        except KvStoreError:
            self._stack.tiers.close()
            raise
        holders = PageHolders()
        self._through = WriteThrough(self._stack, holders, retry, backlog_pages)
        self._context = StoreContext(layout, self._stack, self._through.writer)
        self._sessions = SessionDirectory(holders)
        self._reader = RowReader(self._context, read_batch_pages)
        self._rows = RowWriter(self._context, self._sessions, self._reader)
        self._opener = SessionOpener(self._context, self._sessions)
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

    def open(self, session: str, pages: Sequence[PageId], key: bytes = b"") -> None:
        """Open the session with exactly these pages of rows, or open it anew.

        Pages that no tier has are missing (`missing_pages`): reading them raises MissingPageError
        until `restore` writes them. Those that lie in a bucket are copied back in the background.
        `key`: its tenant's, of `kvstore.format.encryption.KEY_BYTES`, with which pages are encrypted in every
        tier but memory; empty: they are not. Raises RowShapeError for another length, the lowest tier's
        error when it does not answer and memory alone is not sufficient, and that of a bucket which was
        never listed; then nothing has changed.
        """
        key_id = self._stack.keys.add(key)
        with self._sessions.locked(session, create=True) as state:
            self._opener.open(state, pages)
            state.key_id = key_id
            state.kept_at = 0.0
            self._renew(state)
        if self._stack.has_cold(pages):
            self._prefetcher.request(session)

    def close_session(self, session: str) -> None:
        """Forget an open session; its pages stay in all tiers."""
        with self._sessions.locked(session) as state:
            self._opener.close(state)

    def release(self, session: str) -> None:
        """Forget a session that continues in another process.

        Above a shared lowest tier the copies of its pages that no session holds are deleted too, except
        pages that are pending.
        """
        with self._sessions.locked(session) as state:
            self._opener.release(state)
        self._context.writer.drain(())

    def contains(self, pages: Sequence[PageId]) -> list[bool]:
        """Return which pages can be read, as far as it is known. Raises the lowest tier's error."""
        absent = find_absent(self._context, pages)
        return [page_id not in absent for page_id in pages]

    def delete(self, pages: Sequence[PageId]) -> "Future[frozenset[PageId]]":
        """Delete pages from every tier, but those that an open session has.

        The result is those that the lowest tier or a bucket had. Failed deletions are retried in the background.
        Deletions that are waited for at the same time share one sync. A shared tier deletes after a
        while: other processes may be about to use them.
        """
        free, held = self._opener.split_free(pages)
        self._renew_held(held)
        had = frozenset[PageId]()
        with suppress(TierError):
            stored = self._stack.tiers.contains(self._stack.tiers.bottom, free)
            cold = map(self._stack.cold.knows, free)
            had = frozenset(compress(free, map(or_, stored, cold)))
        self._opener.delete(free)
        return then(self._through.flush(free), lambda _: had)

    def list_pages(self, older_than_seconds: float = 0.0) -> set[PageId]:
        """List the pages that this process alone stores.

        And those in a bucket, whoever stored them. Those of another shared tier have a time to live instead.
        """
        tiers = self._stack.tiers
        own = [
            tier
            for tier in tiers.warm
            if not tier.shared and (tier.durable or tier is tiers.lowest)
        ]
        written_before = int(time.time() - older_than_seconds) + 1
        listed = {page_id for tier in own for page_id in tier.list_ids(written_before)}
        listed.update(self._stack.cold.list_ids(written_before))
        return listed

    def sessions(self) -> list[str]:
        """Ids of the open sessions, sorted."""
        return self._sessions.names()

    def append(
        self, session: str, rows: Tensor, pages: Sequence[PageId] = (), *, final: bool = True
    ) -> int:
        """Append rows `[page_layers, parts, n_kv_heads, t, head_dim]` (copied); return the new length.

        `pages`: ids of those that the rows fill. Rows that are not `final` are never written: they,
        and all that follow them, are in memory until `truncate` removes them.

        The first append opens the session. Raises RowShapeError, or a tier's error when no tier
        accepts pages and the backlog is full; then no row was appended.
        """
        self._rows.require_rows(rows)
        with self._sessions.locked(session, create=True) as state:
            self._rows.append(state, rows, pages, final=final)
            return state.length

    def length(self, session: str) -> int:
        """Number of tokens whose rows the session has; 0 for one that is not open."""
        state = self._sessions.get(session)
        return 0 if state is None else state.length

    def truncate(self, session: str, length: int) -> None:
        """Cut the session to its first `length` rows: whole pages, all of them final.

        Raises RowRangeError for any other length.
        """
        with self._sessions.locked(session) as state:
            self._rows.truncate(state, length)

    def drop_page(self, session: str, index: int) -> None:
        """Let a session have one of its pages no more, and delete it unless another one has it.

        Raises RowRangeError for a page that the session does not have, or that rows follow which are
        in memory alone.
        """
        with self._sessions.locked(session) as state:
            page_id = self._rows.drop_page(state, index)
        self._opener.delete([page_id])

    def flush(self, session: str) -> bool:
        """Write all pages of the session; return whether they are in a durable tier.

        If not, their rows stay readable in memory; every later flush and the background retry try
        again.
        """
        return self.begin_flush(session).result()

    def begin_flush(self, session: str) -> "Future[bool]":
        """Begin to `flush`: everything appended so far is covered.

        Flushes that are waited for at the same time share one sync of each tier.
        """
        with self._sessions.locked(session) as state:
            pages = state.unflushed.copy()
            self._renew(state)

        def finish(durable: bool) -> bool:
            kept = durable and self._stack.placement.keep(pages.keys())
            if kept:
                with state.lock:
                    state.mark_flushed(pages)
            return kept

        return then(self._through.flush(pages.keys()), finish)

    def missing_pages(self, session: str) -> list[int]:
        """Indices of the pages that no tier has; reads none."""
        with self._sessions.locked(session) as state:
            find_restored(self._context, state)
            return state.list_missing()

    def repair_pages(self, session: str) -> list[int]:
        """Read and verify every page, shared ones too; return the indices of the missing ones.

        A page of which only a copy in a faster tier is intact is written again to the tier that
        must hold it; `flush` returns once it is there. Raises a tier's error when it does not
        answer, since its pages are not missing.
        """
        with self._sessions.locked(session) as state:
            return self._rows.repair_pages(state)

    def restore(self, session: str, index: int, rows: Tensor) -> None:
        """Write a missing page again: all its rows `[page_layers, parts, n_kv_heads, t, head_dim]`.

        For all sessions that have it. Raises RowShapeError and RowRangeError.
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

    def page_ids(self, session: str, pages: Sequence[int]) -> list[PageId | None]:
        """Ids of pages by index, None for one that is in memory alone; reads nothing.

        Raises RowRangeError for a page that the session does not have.
        """
        with self._sessions.locked(session) as state:
            self._reader.require_pages(state, pages)
            whole = len(state.pages)
            return [state.pages[index] if index < whole else None for index in pages]

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
        """Finish all background work, then raise InvariantError unless tiers and sessions agree.

        Raises a tier's error when no tier accepts a page.
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

    def _renew_held(self, pages: Sequence[PageId]) -> None:
        """Restart the time to live of pages that others delete, now and at their sessions' next flushes."""
        if pages and self._stack.tiers.life_seconds is not None:
            self._through.renew(pages)
            for state in self._sessions.states():
                if not set(pages).isdisjoint(state.pages):
                    state.kept_at = 0.0

    def _renew(self, state: StoredSession) -> None:
        """Record that the session's pages are used; restart their time to live, now and then."""
        self._stack.cold.touch(state.pages)
        life = self._stack.tiers.life_seconds
        if life is None:
            return
        now = time.monotonic()
        if not state.kept_at or now - state.kept_at >= min(_KEEP_SECONDS, life / 8):
            state.kept_at = now
            self._through.renew(tuple(state.pages))


def _require_own_lowest(tiers: Sequence[Tier], bucket: BucketTier | None) -> None:
    """Raise TierSettingsError for a bucket behind a tier that other processes share."""
    if bucket is not None and tiers[-1].shared:
        raise TierSettingsError(
            f"pages cannot be moved from {tiers[-1].name} into a bucket: other workers read them there; "
            "use a bucket without a shared tier"
        )


def _require_ours(layout: PageLayout, tiers: Sequence[Tier]) -> None:
    """Raise ForeignPageError for a directory that has pages of another layout."""
    for tier in tiers:
        if not tier.shared:
            # The header of a damaged page has no layout.
            intact = (header for header in tier.stored() if header.page_tokens)
            if first := next(intact, None):
                require_layout(first, layout)
