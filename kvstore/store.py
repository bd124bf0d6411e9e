"""The row store: every row of every session, written once, gathered by position, kept through restarts.

Rows are appended to a session's unfinished page in memory; a full page goes to the writer's thread and from
there into the tiers. Whoever must know that rows are safe calls `flush`.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from kvstore.consistency import check_store
from kvstore.errors import KvStoreError, PageError, RowRangeError, RowShapeError
from kvstore.format.codec import Codec
from kvstore.format.page import PageLayout
from kvstore.format.page_table import PageTable, SharedPages
from kvstore.format.summaries import Bits, PageSummaries, PageSummary
from kvstore.hierarchy.epochs import WriterEpochs
from kvstore.hierarchy.retry import BackoffRetry
from kvstore.hierarchy.tier_counters import TierCounters
from kvstore.hierarchy.tier_stack import TierStack
from kvstore.hierarchy.write_through import WriteThrough
from kvstore.sessions.directory import SessionDirectory
from kvstore.sessions.gather import ReadKeys
from kvstore.sessions.opener import SessionOpener, Versions
from kvstore.sessions.prefetcher import Prefetcher
from kvstore.sessions.reader import RowReader
from kvstore.sessions.remover import SessionRemover
from kvstore.sessions.state import SequenceNumbers
from kvstore.sessions.writer import RowWriter
from kvstore.tiers.base import Tier


class RowStore:
    """All rows of all sessions over `tiers`, fastest first; the last one is the truth and should be durable.

    Safe to call from several threads; calls for one session take turns. The store owns the tiers and closes
    them. At most `backlog_pages` full pages wait for the writer (then `append` waits); `read_batch_pages`
    bounds the pages that one gather holds in memory at a time. Summaries of full pages, with codes of
    `summary_bits`, take at most `summary_limit` bytes of memory; 0: none are made. Opening raises ForeignPageError
    when a tier holds pages of another layout.

    Whoever writes a session opens it first, under an epoch of its own (`open`). A session that was never opened is
    written under epoch 0; where only this process writes the tiers, it then has what they hold of it.

    `codecs`: one per tier (`TierStack`), all RAW when not given. With INT8 in the lowest tier a page's rows change
    once, within the `append` that finishes the page; from then on every reader gets the decoded rows, from the
    writer's memory as from any tier, before and after a restart. An unfinished page is exact everywhere. Rows that
    `truncate` leaves of a finished page are quantised a second time when the page is finished again.
    """

    def __init__(
        self,
        layout: PageLayout,
        tiers: Sequence[Tier],
        *,
        backlog_pages: int = 64,
        read_batch_pages: int = 16,
        summary_limit: int = 1 << 30,
        summary_bits: Bits = 12,
        codecs: Sequence[Codec] | None = None,
    ) -> None:
        self._layout = layout
        epochs = WriterEpochs()
        numbers = SequenceNumbers()
        retrying = BackoffRetry(lambda: self._through.retry())
        self._stack = TierStack(layout, tiers, codecs, epochs, retrying.wake)
        try:
            stored = self._sessions_stored(numbers)
        except KvStoreError:
            self._stack.tiers.close()
            raise
        self._epochs = epochs
        self._summaries = PageSummaries(summary_limit, summary_bits)
        self._through = WriteThrough(
            layout, self._stack, self._summaries, epochs, retrying, backlog_pages
        )
        writer = self._through.writer
        self._reader = RowReader(layout, self._stack, writer, self._summaries, read_batch_pages)
        self._rows = RowWriter(layout, self._stack, writer, self._reader, numbers, epochs)
        self._opener = SessionOpener(
            layout, self._stack, writer, self._rows, numbers, epochs, self._versions_of
        )
        self._sessions = SessionDirectory(stored, self._opener.recover)
        self._remover = SessionRemover(
            self._stack, writer, self._rows, self._sessions, self._summaries, epochs
        )
        self._prefetcher = Prefetcher(layout, self._stack, self._sessions)

    @property
    def layout(self) -> PageLayout:
        """Shape, dtype and fingerprint of the rows."""
        return self._layout

    # Sessions

    def open(
        self, session: str, *, epoch: int, length: int, shared: Sequence[SharedPages] = ()
    ) -> None:
        """From now on the session has exactly `length` rows, the first of them in pages that others wrote (`shared`),
        and is written under `epoch`.

        Rows beyond are gone when this returns. Pages that are not found are lost (`missing_pages`): reading them raises
        LostPageError, `restore` puts them back. Raises StaleWriterError when the session was opened under a later
        epoch, here or elsewhere; RowRangeError when it shares more than `length` rows; a tier's error when the lowest
        tier does not answer and memory alone does not tell.
        """
        with self._sessions.locked(session, create=True, recover=False) as state:
            self._opener.open(state, epoch, length, shared)

    def fork(
        self, parent: str, child: str, *, epoch: int, length: int, shared: Sequence[SharedPages]
    ) -> None:
        """Open `child` with the first `length` rows of `parent`: whole pages are `shared`, the rows after them copied.

        Raises as `open` and `gather`, and RowRangeError when the parent has fewer rows.
        """
        pages = PageTable(child, shared).shared_pages
        page_tokens = self._layout.page_tokens
        with self._sessions.locked(parent) as state:
            if not pages * page_tokens <= length <= state.length:
                raise RowRangeError(
                    f"a fork of {length} tokens shares {pages} pages of {page_tokens}; "
                    f"its parent {parent!r} has {state.length} tokens"
                )
            known: dict[str, dict[int, tuple[int, int]]] = {}
            for index in range(pages):
                page = state.table.expected(index)
                known.setdefault(page.key.session, {})[index] = (page.sequence, page_tokens)
            rest = self._reader.gather(state, torch.arange(pages * page_tokens, length))
        with self._sessions.locked(child, create=True, recover=False) as state:
            self._opener.open(state, epoch, pages * page_tokens, shared, known)
            self._rows.append(state, rest)

    def drop(self, session: str, *, keep_pages: int = 0) -> None:
        """Forget a session in every tier, for good, but for its own first `keep_pages` pages, which others share.

        An unknown session is ignored, and so is who wrote it last. What a tier does not delete now is tried again in
        the background. Raises a tier's error where it had to say what it holds.
        """
        self._remover.drop(session, keep_pages)

    def retain(self, sessions: Collection[str], shared: Sequence[SharedPages] = ()) -> list[str]:
        """Drop sessions that an earlier process left and the catalog does not know; returns them.

        `sessions` are those it knows; of others, `shared` says how many first pages are still shared. Sessions that
        were opened or appended to since the start stay. In tiers that others write too nothing is dropped.
        """
        return self._remover.retain(sessions, shared)

    def release(self, session: str) -> None:
        """Forget a session that goes on elsewhere: in memory, and where the lowest tier is shared in those above it.

        What the lowest tier is still to get stays until it has it.
        """
        self._remover.release(session)

    def sessions(self) -> list[str]:
        """The sessions that are open, or were found in tiers that only this process writes; sorted."""
        return self._sessions.names()

    # Rows

    def append(self, session: str, rows: Tensor) -> int:
        """Add rows `[n_layers, 2, n_kv_heads, t, head_dim]` (copied) and return the session's new length in tokens.

        The first append makes the session. Raises RowShapeError, StaleWriterError when another writer has taken the
        session over, or a tier's error when no tier takes pages any more and the backlog is full; then no row was
        added.
        """
        self._rows.require_rows(rows)
        with self._sessions.locked(session, create=True) as state:
            state.known = True
            self._rows.append(state, rows)
            return state.length

    def length(self, session: str) -> int:
        """Tokens whose rows the session has; 0 for a session that does not exist."""
        known = self._sessions.in_memory(session)
        if known is not None:
            return known.length
        with self._sessions.locked(session) as state:
            return state.length

    def truncate(self, session: str, length: int) -> None:
        """Drop the rows from position `length` on. Raises RowRangeError when the session has fewer, or shares some."""
        with self._sessions.locked(session) as state:
            self._rows.truncate(state, length)

    def flush(self, session: str) -> bool:
        """Whether every row of the session is in a durable tier when this returns.

        If not, the rows are held in memory, readable, and every later flush tries again, as the store does in the
        background. Raises StaleWriterError when another writer has taken the session over.
        """
        with self._sessions.locked(session) as state:
            self._epochs.require_writable(session, state.epoch)
            with suppress(PageError):  # an unfinished page that is lost is not there to be flushed
                self._rows.hand_over_unfinished_page(state)
            epoch = state.epoch
            owners = state.table.owners
        durable = self._through.flush(owners)
        self._epochs.require_writable(session, epoch)
        return durable

    def missing_pages(self, session: str) -> list[int]:
        """The pages that were not found when the session was opened, by index; nothing is read."""
        with self._sessions.locked(session) as state:
            return state.table.lost()

    def lost_pages(self, session: str) -> list[int]:
        """The pages that no tier can give, by index, after reading and verifying every one, shared ones too.

        A page of which only a copy in a faster tier is whole is written again where it belongs; `flush` says when it is
        there. Raises a tier's error when it does not answer, for what it holds is not lost; StaleWriterError.
        """
        with self._sessions.locked(session) as state:
            return self._rows.mend(state)

    def restore(self, session: str, index: int, rows: Tensor) -> None:
        """Put back the rows of a lost page, `[n_layers, 2, n_kv_heads, t, head_dim]` with all the tokens it has.

        A page that is shared comes back for all who share it. Raises RowShapeError, RowRangeError, StaleWriterError.
        """
        with self._sessions.locked(session) as state:
            self._rows.restore(state, index, rows)

    def gather(self, session: str, positions: Tensor) -> Tensor:
        """Positions int64 `[m]` -> rows `[n_layers, 2, n_kv_heads, m, head_dim]`.

        Raises RowRangeError for a position the session does not have, and a PageError when a page is corrupt,
        foreign or lost.
        """
        with self._sessions.locked(session) as state:
            return self._reader.gather(state, positions)

    def gather_heads(self, session: str, layer: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """One layer, each head its own rows: int64 `[n_kv_heads, m]` -> keys, values `[n_kv_heads, m, head_dim]`.

        Position -1 leaves zeros. Raises as `gather`.
        """
        with self._sessions.locked(session) as state:
            return self._reader.gather_layers(state, [positions], [layer])[0]

    def gather_selection(
        self, session: str, selection: Sequence[Tensor]
    ) -> list[tuple[Tensor, Tensor]]:
        """A whole selection, each page read once: per layer int64 `[n_kv_heads, m_l]` -> keys, values.

        Keys and values are `[n_kv_heads, m_l, head_dim]`; position -1 means no row and leaves zeros. Raises as
        `gather`, and RowShapeError unless there is one entry per layer.
        """
        if len(selection) != self._layout.n_layers:
            raise RowShapeError(
                f"a selection has one entry per layer ({self._layout.n_layers}), got {len(selection)}"
            )
        with self._sessions.locked(session) as state:
            return self._reader.gather_layers(state, selection, range(self._layout.n_layers))

    def scan_keys(
        self, session: str, start: int = 0, stop: int | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """The keys of positions start..stop-1, page by page: (first position, `[n_layers, n_kv_heads, t, head_dim]`).

        Copies of one page at a time; nothing is promoted between tiers. Raises as `gather`.
        """
        length = self.length(session)
        stop = length if stop is None else stop
        if not 0 <= start <= stop <= length:
            raise RowRangeError(
                f"positions {start}..{stop} asked for, session {session!r} has {length} rows"
            )
        page_tokens = self._layout.page_tokens
        for first in range(start - start % page_tokens, stop if start < stop else 0, page_tokens):
            begin = max(start, first)
            end = min(stop, first + page_tokens)
            with self._sessions.locked(session) as state:
                keys = self._reader.keys_between(state, begin, end)
            yield begin, keys

    def read_keys(self, session: str, pages: Sequence[int]) -> ReadKeys:
        """The keys of chosen pages, by index, all at once; nothing is promoted between tiers.

        Pages that have no summary get one if there is room. Raises as `gather`.
        """
        with self._sessions.locked(session) as state:
            return self._reader.read_keys(state, pages)

    def summaries(self, session: str, pages: Sequence[int]) -> list[PageSummary | None]:
        """The summaries of pages, by index; None where there is none (yet). Raises as `read_keys`."""
        with self._sessions.locked(session) as state:
            return self._reader.summaries(state, pages)

    def prefetch(self, session: str) -> None:
        """Begin to bring pages that memory lacks there, the last ones first, as far as they take half of it."""
        self._prefetcher.ask(session)

    # The store

    def summary_bytes(self) -> int:
        """Bytes of memory that the summaries of all sessions take."""
        return self._summaries.bytes

    def usage(self) -> dict[str, int]:
        """Bytes of the pages in each tier, headers included, by the tier's name."""
        return self._stack.tiers.used_bytes()

    def limits(self) -> dict[str, int | None]:
        """The most bytes that each tier takes, by the tier's name; None: as many as there is room for."""
        return self._stack.tiers.limit_bytes()

    def counters(self) -> dict[str, TierCounters]:
        """What each tier did since the store was opened, by the tier's name."""
        return self._stack.tiers.counters()

    def check(self) -> None:
        """Wait for the writer, then raise InvariantError unless the tiers hold exactly the sessions' pages.

        Where others write the lowest tier too, only the sessions that are open here are looked at there. Raises a
        tier's error when none takes what has to be written.
        """
        self._through.finish()
        self._stack.tiers.check()
        check_store(self._layout, self._stack, self._sessions)

    def close(self) -> None:
        """Flush every session, then close the tiers, whatever the flush said. May be called twice.

        Raises a tier's error when rows are in no tier that outlives the process though one should have them.
        """
        if not self._sessions.close():
            return
        self._prefetcher.close()
        try:
            for state in self._sessions.states():
                with state.lock, suppress(PageError):
                    self._rows.hand_over_unfinished_page(state)
        finally:
            self._through.close()

    # Inside

    def _sessions_stored(self, numbers: SequenceNumbers) -> set[str]:
        found = set()
        for header in self._stack.all_headers():
            numbers.seen(header.sequence)
            found.add(header.key.session)
        return found

    def _versions_of(self, session: str) -> Versions | None:
        return self._sessions.versions(session, self._layout.page_tokens)
