"""Reading rows of a session, whose lock the caller holds: from its unfinished page, pages on their way, or tiers."""

from collections.abc import Iterator, Sequence

from torch import Tensor

from kvstore.errors import RowRangeError, RowShapeError
from kvstore.format.page import HEADER_BYTES, PageLayout
from kvstore.format.summaries import PageSummaries, PageSummary
from kvstore.hierarchy.page_writer import PageWriter
from kvstore.hierarchy.tier_stack import TierStack
from kvstore.sessions.gather import ReadKeys, gather_selection, gather_tokens
from kvstore.sessions.state import StoredSession


class RowReader:
    """Reads through a session's page table. A batch of pages is in memory at a time."""

    def __init__(
        self,
        layout: PageLayout,
        stack: TierStack,
        writer: PageWriter,
        summaries: PageSummaries,
        batch_pages: int,
    ) -> None:
        self._layout = layout
        self._stack = stack
        self._writer = writer
        self._summaries = summaries
        self._batch_pages = batch_pages

    def gather(self, state: StoredSession, positions: Tensor) -> Tensor:
        """Positions int64 `[m]` -> rows `[n_layers, 2, n_kv_heads, m, head_dim]`."""
        return gather_tokens(
            self._layout, positions, state.length, lambda pages: self.pages(state, pages)
        )

    def gather_layers(
        self, state: StoredSession, selection: Sequence[Tensor], layers: Sequence[int]
    ) -> list[tuple[Tensor, Tensor]]:
        """Per layer int64 `[n_kv_heads, m_l]` -> keys, values `[n_kv_heads, m_l, head_dim]`."""
        if not all(0 <= layer < self._layout.n_layers for layer in layers):
            raise RowShapeError(
                f"layers {list(layers)} asked for, the rows have {self._layout.n_layers}"
            )
        return gather_selection(
            self._layout, selection, state.length, lambda pages: self.pages(state, pages), layers
        )

    def keys_between(self, state: StoredSession, begin: int, end: int) -> Tensor:
        """A copy of the keys of positions begin..end-1, all in one page; nothing is promoted."""
        if end > state.length:
            raise RowRangeError(
                f"session {state.name!r} was truncated to {state.length} during a scan"
            )
        index, offset = divmod(begin, self._layout.page_tokens)
        page = next(self.pages(state, [index], promote=False))
        return page[:, 0].narrow(2, offset, end - begin).clone()

    def read_keys(self, state: StoredSession, pages: Sequence[int]) -> ReadKeys:
        """The keys of chosen pages, and summaries for those that have none."""
        self.require_pages(state, pages)
        keys = list[Tensor]()
        bytes_read = 0
        full = state.length // self._layout.page_tokens
        for index, (rows, delivered) in zip(
            pages, self._fetch(state, pages, promote=False), strict=True
        ):
            bytes_read += HEADER_BYTES + rows.nbytes if delivered else 0
            if index < full:
                self._summaries.make(state.table.expected(index), rows[:, 0])
                keys.append(rows[:, 0])
            else:  # unfinished: it may be written to while the keys are in use
                keys.append(rows[:, 0, :, : state.length % self._layout.page_tokens].clone())
        return ReadKeys(keys, bytes_read)

    def summaries(self, state: StoredSession, pages: Sequence[int]) -> list[PageSummary | None]:
        """The summaries of pages, by index; None where there is none (yet)."""
        self.require_pages(state, pages)
        full = state.length // self._layout.page_tokens
        table = state.table
        return [
            self._summaries.of(table.expected(index))
            if index < full and table.sequence(index) is not None
            else None
            for index in pages
        ]

    def verified(self, state: StoredSession, index: int) -> tuple[Tensor, bool]:
        """A page's rows and whether it is where it belongs: on its way, or in the tier that has to keep it.

        Raises a PageError for a page that is lost, and a tier's error if it does not answer.
        """
        rows = self._in_memory(state, index)
        return self._stack.verified(state.table.expected(index)) if rows is None else (rows, True)

    def pages(
        self, state: StoredSession, pages: Sequence[int], *, promote: bool = True
    ) -> Iterator[Tensor]:
        """The pages' rows in the order asked for, from memory or the tiers, a batch at a time."""
        return (rows for rows, _ in self._fetch(state, pages, promote=promote))

    def require_pages(self, state: StoredSession, pages: Sequence[int]) -> None:
        """Raise RowRangeError unless the session has these pages."""
        count = -(-state.length // self._layout.page_tokens)
        if pages and not 0 <= min(pages) <= max(pages) < count:
            raise RowRangeError(
                f"pages {min(pages)}..{max(pages)} asked for, session {state.name!r} has {count}"
            )

    def _fetch(
        self, state: StoredSession, pages: Sequence[int], *, promote: bool
    ) -> Iterator[tuple[Tensor, bool]]:
        """As `pages`, with whether a tier had to deliver the page."""
        for first in range(0, len(pages), self._batch_pages):
            batch = pages[first : first + self._batch_pages]
            in_memory = {
                index: rows
                for index in batch
                if (rows := self._in_memory(state, index)) is not None
            }
            below = [state.table.expected(index) for index in batch if index not in in_memory]
            read = {
                page.key.index: rows
                for page, rows in zip(below, self._stack.read(below, promote=promote), strict=True)
            }
            for index in batch:
                yield (in_memory[index], False) if index in in_memory else (read[index], True)

    def _in_memory(self, state: StoredSession, index: int) -> Tensor | None:
        if state.tail is not None and index == state.length // self._layout.page_tokens:
            return state.tail
        pending = self._writer.pending(state.table.key(index))
        sequence = state.table.sequence(index)
        # An owner's page may be on its way in a version that another session may not read.
        return pending.rows if pending is not None and pending.page.sequence == sequence else None
