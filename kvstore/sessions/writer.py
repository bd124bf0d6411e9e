"""Writing of session rows: append, truncate, restore and repair."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvstore.errors import PageError, RowRangeError, RowShapeError
from kvstore.format.buffers import zero_rows
from kvstore.format.page import Blob, PageId
from kvstore.hierarchy.page_writer import QueuedPage
from kvstore.sessions.context import StoreContext
from kvstore.sessions.directory import SessionDirectory
from kvstore.sessions.reader import RowReader
from kvstore.sessions.state import StoredSession


class RowWriter:
    """Fills a session's pages and submits them; the caller holds the session's lock."""

    def __init__(
        self, context: StoreContext, sessions: SessionDirectory, reader: RowReader
    ) -> None:
        self._layout = context.layout
        self._stack = context.stack
        self._writer = context.writer
        self._sessions = sessions
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

    def append(
        self, state: StoredSession, rows: Tensor, ids: Sequence[PageId], *, final: bool
    ) -> None:
        """Append rows that fit the layout; those that are not `final` stay in memory.

        Raises RowShapeError unless there is one id for each page that final rows fill, or a tier's
        error, before any row is appended.
        """
        page_tokens = self._layout.page_tokens
        tokens = rows.shape[3]
        filled = (state.length % page_tokens + tokens) // page_tokens if final else 0
        if filled != len(ids):
            raise RowShapeError(f"the rows fill {filled} pages, got {len(ids)} ids")
        if filled:
            self._writer.wait_for_room()
        names = iter(ids)
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
                self._add_page(state, next(names), state.behind.pop())

    def truncate(self, state: StoredSession, length: int) -> None:
        """Cut the session to its first `length` rows: whole pages, all of them final.

        Of the pages behind them, those that are stored stay: they are right for their tokens, and
        another session may have them. Raises RowRangeError for any other length.
        """
        pages, inside = divmod(length, self._layout.page_tokens)
        if inside or not 0 <= pages <= len(state.pages):
            raise RowRangeError(
                f"cannot truncate session {state.name!r} to {length} tokens: it has "
                f"{len(state.pages)} pages of {self._layout.page_tokens}"
            )
        dropped = state.keep(pages, length)
        self._sessions.holders.release(dropped)
        self._writer.discard(dropped)

    def drop_page(self, state: StoredSession, index: int) -> PageId:
        """Remove a page from the session, whose later rows move up; returns its id."""
        if state.behind or not 0 <= index < len(state.pages):
            raise RowRangeError(
                f"session {state.name!r} has {len(state.pages)} whole pages, got index {index}"
            )
        page_id = state.pages.pop(index)
        state.missing.discard(page_id)
        state.unflushed.pop(page_id, None)
        state.length -= self._layout.page_tokens
        self._sessions.holders.release([page_id])
        return page_id

    def repair_pages(self, state: StoredSession) -> list[int]:
        """Read and verify every page, rewrite those of which only a copy is left.

        Returns the indices of the missing pages. Raises a tier's error when it does not answer or
        does not accept a page.
        """
        missing = []
        self._stack.fetch_cold(state.pages)
        for index, page_id in enumerate(state.pages):
            try:
                rows, is_stored = self._reader.read_verified(state, index)
            except PageError:
                missing.append(index)
                continue
            if not is_stored:
                self._writer.wait_for_room()
                # As RAW: rows decoded from INT8 must not be quantised again.
                self._rewrite(state, page_id, rows.contiguous())
        return missing

    def restore(self, state: StoredSession, index: int, rows: Tensor) -> None:
        """Write the rows of a missing or damaged page again, for all sessions that have it.

        Raises RowRangeError or RowShapeError.
        """
        if not 0 <= index < len(state.pages):
            raise RowRangeError(
                f"session {state.name!r} has {len(state.pages)} whole pages, got index {index}"
            )
        self.require_rows(rows, self._layout.page_tokens)
        rows = rows.clone(memory_format=torch.contiguous_format)
        page_id = state.pages[index]
        self._rewrite(state, page_id, *self._stack.placement.encode(page_id, rows, state.key_id))
        state.missing.discard(page_id)

    def _add_page(self, state: StoredSession, page_id: PageId, rows: Tensor) -> None:
        """Add the session's next page, and submit it unless it is stored already."""
        rows, blob = self._stack.placement.encode(page_id, rows, state.key_id)
        self._sessions.holders.hold([page_id])
        state.pages.append(page_id)
        state.mark_unflushed(page_id)
        self._writer.submit(QueuedPage(page_id, rows, blob, state.key_id))

    def _rewrite(
        self, state: StoredSession, page_id: PageId, rows: Tensor, blob: Blob | None = None
    ) -> None:
        """Replace what the tiers have of a page: it may be damaged."""
        self._writer.submit(QueuedPage(page_id, rows, blob, state.key_id, replace=True))
        state.mark_unflushed(page_id)
