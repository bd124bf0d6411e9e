"""Adding and removing rows of a session, whose lock the caller holds."""

from contextlib import suppress

import torch
from torch import Tensor

from kvstore.errors import PageError, RowRangeError, RowShapeError, TierError
from kvstore.format.buffers import zero_rows
from kvstore.format.page import Blob, PageLayout
from kvstore.format.page_table import ExpectedPage
from kvstore.hierarchy.epochs import WriterEpochs
from kvstore.hierarchy.page_writer import PageWriter, QueuedPage
from kvstore.hierarchy.tier_stack import TierStack
from kvstore.sessions.reader import RowReader
from kvstore.sessions.state import SequenceNumbers, StoredSession
from kvstore.tiers.base import UNFENCED


class RowWriter:
    """Fills a session's unfinished page and hands pages over to the page writer."""

    def __init__(
        self,
        layout: PageLayout,
        stack: TierStack,
        writer: PageWriter,
        reader: RowReader,
        numbers: SequenceNumbers,
        epochs: WriterEpochs,
    ) -> None:
        self._layout = layout
        self._stack = stack
        self._writer = writer
        self._reader = reader
        self._numbers = numbers
        self._epochs = epochs

    def require_rows(self, rows: Tensor, tokens: int | None = None) -> int:
        """How many tokens the rows are of. Raises RowShapeError unless they fit the layout (and are of `tokens`)."""
        found = rows.shape[3] if rows.dim() == 5 else 0
        wanted = self._layout.rows_shape(found if tokens is None else tokens)
        if tuple(rows.shape) != wanted or rows.dtype != self._layout.dtype:
            raise RowShapeError(
                f"rows must be {self._layout.dtype} {wanted}, got {rows.dtype} {tuple(rows.shape)}"
            )
        return found

    def append(self, state: StoredSession, rows: Tensor) -> None:
        """Add rows that fit. Raises StaleWriterError or a tier's error before any is added."""
        page_tokens = self._layout.page_tokens
        tokens = rows.shape[3]
        self._epochs.require_writable(state.name, state.epoch)
        if state.length % page_tokens + tokens >= page_tokens:
            self._writer.wait_for_room()
        done = 0
        while done < tokens:
            offset = state.length % page_tokens
            step = min(page_tokens - offset, tokens - done)
            self._tail(state).narrow(3, offset, step).copy_(rows.narrow(3, done, step))
            state.length += step
            state.unflushed = True
            done += step
            if state.length % page_tokens == 0:
                self._hand_over_full_page(state)

    def truncate(self, state: StoredSession, length: int) -> None:
        """Drop the rows from position `length` on. Raises RowRangeError where the session has none, or shares some."""
        if not 0 <= length <= state.length:
            raise RowRangeError(
                f"cannot truncate session {state.name!r} to {length} tokens: it has {state.length}"
            )
        page_tokens = self._layout.page_tokens
        if length < state.table.shared_pages * page_tokens:
            raise RowRangeError(
                f"cannot truncate session {state.name!r} to {length} tokens: it shares its first "
                f"{state.table.shared_pages} pages of {page_tokens}"
            )
        if length == state.length:
            return
        self._writer.discard(state.table.cut(-(-length // page_tokens)), state.epoch)
        if length // page_tokens != state.length // page_tokens:
            state.tail = None
        state.length = length
        # The version that was handed over has more rows: a restart must not find them again.
        state.unflushed = length % page_tokens != 0

    def mend(self, state: StoredSession) -> list[int]:
        """The pages that are lost, after reading every one where it belongs; what only a copy has is written there.

        Raises a tier's error when one does not answer, or does not take a page; StaleWriterError.
        """
        lost = []
        for index in range(-(-state.length // self._layout.page_tokens)):
            try:
                rows, kept = self._reader.verified(state, index)
            except PageError:
                lost.append(index)
                continue
            if not kept:
                self._epochs.require_writable(state.name, state.epoch)
                self._writer.wait_for_room()
                # RAW: what was decoded from INT8 is not to be encoded as that again.
                self._submit_again(state, state.table.expected(index), rows.contiguous())
        return lost

    def restore(self, state: StoredSession, index: int, rows: Tensor) -> None:
        """Put the rows of a lost page back, as whoever shares it expects it."""
        self._reader.require_pages(state, [index])
        self._epochs.require_writable(state.name, state.epoch)
        self.require_rows(rows, state.filled(index, self._layout.page_tokens))
        sequence = self._restored_sequence(state, index)
        page = ExpectedPage(state.table.key(index), sequence, index < state.table.shared_pages)
        rows = rows.clone(memory_format=torch.contiguous_format)
        self._submit_again(state, page, *self._stack.placement.settled(page, rows))
        state.table.put(index, sequence)
        if index == state.length // self._layout.page_tokens:
            state.tail = None
            state.unflushed = False

    def hand_over_unfinished_page(self, state: StoredSession, *, cut: bool = False) -> None:
        """Hand the unfinished page over if it changed. `cut`: what is stored of it has rows that must go."""
        index, valid = divmod(state.length, self._layout.page_tokens)
        if valid and state.unflushed:
            self._submit(state, index, self._tail(state).narrow(3, 0, valid).clone(), cut)

    def _hand_over_full_page(self, state: StoredSession) -> None:
        assert state.tail is not None, "the page was just filled"
        self._submit(state, state.length // self._layout.page_tokens - 1, state.tail)
        state.tail = None

    def _submit(self, state: StoredSession, index: int, rows: Tensor, cut: bool = False) -> None:
        page = ExpectedPage(state.table.key(index), self._numbers.next(state.epoch))
        self._writer.submit(
            QueuedPage(page, *self._stack.placement.settled(page, rows), state.epoch, cut)
        )
        state.table.put(index, page.sequence)
        state.unflushed = False

    def _submit_again(
        self, state: StoredSession, page: ExpectedPage, rows: Tensor, blob: Blob | None = None
    ) -> None:
        """Hand a page over that was stored before, for whoever shares it."""
        self._writer.submit(QueuedPage(page, rows, blob, UNFENCED if page.shared else state.epoch))

    def _tail(self, state: StoredSession) -> Tensor:
        if state.tail is None:
            tail = zero_rows(self._layout.rows_shape(self._layout.page_tokens), self._layout.dtype)
            index, valid = divmod(state.length, self._layout.page_tokens)
            if valid:
                stored = next(self._reader.pages(state, [index]))
                tail.narrow(3, 0, valid).copy_(stored.narrow(3, 0, valid))
            state.tail = tail
        return state.tail

    def _restored_sequence(self, state: StoredSession, index: int) -> int:
        """The number that the session expects; a later one where that is not known or some tier has a later version."""
        known = state.table.sequence(index)
        key = state.table.key(index)
        newest = -1
        with suppress(TierError):
            newest = self._stack.newest_sequence(key)
        if known is not None and known >= newest:
            return known
        if key.session != state.name:
            return max(newest, known or 0) + 1
        self._numbers.seen(max(newest, 0))
        return self._numbers.next(state.epoch)
