"""Writing of session rows: append, truncate, restore and repair."""

from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from kvstore.errors import PageError, RowRangeError, RowShapeError, TierError
from kvstore.format.buffers import zero_rows
from kvstore.format.page import Blob, first_sequence
from kvstore.format.page_table import ExpectedPage
from kvstore.hierarchy.page_writer import QueuedPage
from kvstore.sessions.context import StoreContext
from kvstore.sessions.reader import RowReader
from kvstore.sessions.state import StoredSession
from kvstore.tiers.base import UNFENCED


class RowWriter:
    """Fills a session's pages and submits them; the caller holds the session's lock."""

    def __init__(self, context: StoreContext, reader: RowReader) -> None:
        self._layout = context.layout
        self._stack = context.stack
        self._writer = context.writer
        self._epochs = context.epochs
        self._reader = reader

    def require_rows(self, rows: Tensor, tokens: int | None = None) -> None:
        """Raise RowShapeError unless rows fit the layout and, if given, have `tokens` tokens."""
        actual_tokens = rows.shape[3] if rows.dim() == 5 else 0
        expected = self._layout.rows_shape(actual_tokens if tokens is None else tokens)
        if tuple(rows.shape) != expected or rows.dtype != self._layout.dtype:
            raise RowShapeError(
                f"rows must be {self._layout.dtype} {expected}, "
                f"got {rows.dtype} {tuple(rows.shape)}"
            )

    def append(self, state: StoredSession, rows: Tensor, *, final: bool) -> None:
        """Append rows that fit the layout; those that are not `final` stay in memory.

        Raises StaleWriterError or a tier's error before any row is appended.
        """
        page_tokens = self._layout.page_tokens
        tokens = rows.shape[3]
        self._epochs.require_writable(state.name, state.epoch)
        if final and state.length % page_tokens + tokens >= page_tokens:
            self._writer.wait_for_room()
        done = 0
        while done < tokens:
            offset = state.length % page_tokens
            step = min(page_tokens - offset, tokens - done)
            if offset == 0:
                shape = self._layout.rows_shape(page_tokens)
                state.behind.append(zero_rows(shape, self._layout.dtype))
            state.behind[-1].narrow(3, offset, step).copy_(rows.narrow(3, done, step))
            state.length += step
            done += step
            if final and state.length % page_tokens == 0:
                assert len(state.behind) == 1, "no final row follows one that is not"
                self._submit(state, state.behind.pop())

    def truncate(
        self, state: StoredSession, length: int, dropped: Sequence[range] | None = None
    ) -> None:
        """Cut the session to its first `length` rows: whole pages, all of them final.

        dropped: numbers of the pages that it had dropped when it had these rows; None: as now.
        Raises RowRangeError for any other length, and when shared pages would be cut.
        """
        pages, inside = divmod(length, self._layout.page_tokens)
        gaps = state.table.dropped if dropped is None else dropped
        if inside or not 0 <= pages + sum(map(len, gaps)) <= state.table.stored_pages:
            raise RowRangeError(
                f"cannot truncate session {state.name!r} to {length} tokens: it has "
                f"{len(state.table)} pages of {self._layout.page_tokens}"
            )
        self._writer.delete(state.table.truncate(pages, gaps), state.epoch)
        state.behind = []
        state.length = length

    def drop(self, state: StoredSession, length: int) -> None:
        """Go on behind the first `length` rows: whole pages. Those behind them stay stored.

        Raises RowRangeError for any other length.
        """
        pages, inside = divmod(length, self._layout.page_tokens)
        if inside or not 0 <= pages <= len(state.table):
            raise RowRangeError(
                f"session {state.name!r} cannot drop its rows from {length} on: it has "
                f"{len(state.table)} pages of {self._layout.page_tokens}"
            )
        state.table.drop(pages)
        state.behind = []
        state.length = length

    def drop_page(self, state: StoredSession, index: int) -> None:
        """Delete one of the session's own pages, which is missing from now on."""
        self._writer.delete([state.table.key(index)], state.epoch)
        state.table.put(index, None)

    def repair_pages(self, state: StoredSession) -> list[int]:
        """Read and verify every page, rewrite those of which only a copy is left.

        Returns the indices of the missing pages. Raises StaleWriterError, or a tier's error when
        it does not answer or does not accept a page.
        """
        missing = []
        for index in range(len(state.table)):
            try:
                rows, is_stored = self._reader.read_verified(state, index)
            except PageError:
                missing.append(index)
                continue
            if not is_stored:
                self._epochs.require_writable(state.name, state.epoch)
                self._writer.wait_for_room()
                # As RAW: rows decoded from INT8 must not be quantised again.
                self._resubmit(state, state.table.expected(index), rows.contiguous())
        return missing

    def restore(self, state: StoredSession, index: int, rows: Tensor) -> None:
        """Write the rows of a missing page again, in a version that its forks accept.

        Raises RowRangeError, RowShapeError or StaleWriterError.
        """
        if not 0 <= index < len(state.table):
            raise RowRangeError(
                f"session {state.name!r} has {len(state.table)} whole pages, got index {index}"
            )
        self._epochs.require_writable(state.name, state.epoch)
        self.require_rows(rows, self._layout.page_tokens)
        sequence = self._get_restored_sequence(state, index)
        key = state.table.key(index)
        page = ExpectedPage(key, sequence, key.index < state.table.shared_pages)
        rows = rows.clone(memory_format=torch.contiguous_format)
        self._resubmit(state, page, *self._stack.placement.encode(page, rows))
        state.table.put(index, sequence)

    def _submit(self, state: StoredSession, rows: Tensor) -> None:
        """Submit the session's next page."""
        page = ExpectedPage(state.table.key(len(state.table)), state.next_sequence())
        rows, blob = self._stack.placement.encode(page, rows)
        self._writer.submit(QueuedPage(page, rows, blob, state.epoch))
        state.table.append(page.sequence)

    def _resubmit(
        self, state: StoredSession, page: ExpectedPage, rows: Tensor, blob: Blob | None = None
    ) -> None:
        """Submit a page that was stored before; a shared one passes the fence of its owner."""
        self._writer.submit(QueuedPage(page, rows, blob, UNFENCED if page.shared else state.epoch))

    def _get_restored_sequence(self, state: StoredSession, index: int) -> int:
        """Sequence number for a restored page.

        The expected one; a later one when it is unknown or when a tier has a later version.
        """
        known = state.table.sequence(index)
        key = state.table.key(index)
        newest = -1
        with suppress(TierError):
            newest = self._stack.newest_sequence(key)
        if known is not None and known >= newest:
            return known
        entry = state.table.shared_entry(index)
        if entry is None:
            state.last_sequence = max(state.last_sequence, newest)
            return state.next_sequence()
        # Under an epoch whose pages have these rows committed, so that it is read again.
        committed = entry.history.first_epoch((key.index + 1) * self._layout.page_tokens)
        return max(newest + 1, (known or 0) + 1, first_sequence(committed) + 1)
