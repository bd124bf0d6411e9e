"""Reading of session rows: from pages in memory alone, queued pages or the tiers."""

from collections.abc import Iterator, Sequence

from torch import Tensor

from kvstore.errors import RowRangeError, RowShapeError
from kvstore.format.gather import ReadKeys, gather_run, gather_selection, gather_tokens
from kvstore.format.page import HEADER_BYTES, PageId
from kvstore.sessions.context import StoreContext
from kvstore.sessions.presence import find_restored
from kvstore.sessions.state import StoredSession


class RowReader:
    """Reads rows of a session; the caller holds its lock.

    At most `batch_pages` pages are in memory at a time.
    """

    def __init__(self, context: StoreContext, batch_pages: int) -> None:
        self._context = context
        self._layout = context.layout
        self._stack = context.stack
        self._writer = context.writer
        self._batch_pages = batch_pages

    def gather(self, state: StoredSession, positions: Tensor) -> Tensor:
        """Gather positions int64 `[m]` as rows `[n_layers, 2, n_kv_heads, m, head_dim]`."""
        return gather_tokens(
            self._layout, positions, state.length, lambda pages: self.pages(state, pages)
        )

    def gather_layers(
        self,
        state: StoredSession,
        selection: Sequence[Tensor],
        layers: range,
        *,
        promote: bool = True,
    ) -> list[tuple[Tensor, Tensor]]:
        """Gather int64 `[n_kv_heads, m_l]` per layer as keys, values `[n_kv_heads, m_l, head_dim]`.

        Raises RowShapeError for a layer that the rows do not have.
        """
        if not all(0 <= layer < self._layout.n_layers for layer in layers):
            raise RowShapeError(
                f"layers must lie in 0..{self._layout.n_layers - 1}, got {list(layers)}"
            )
        return gather_selection(
            self._layout,
            selection,
            state.length,
            lambda pages: self.pages(state, pages, promote=promote),
            layers,
        )

    def gather_side(self, state: StoredSession, start: int, stop: int) -> Tensor:
        """Gather positions start..stop-1 of the side layers, `[side_layers, parts, n_kv_heads, t, head_dim]`.

        Raises RowRangeError for positions that the session does not have.
        """
        if not 0 <= start <= stop <= state.length:
            raise RowRangeError(
                f"session {state.name!r} has {state.length} tokens, got positions {start} to {stop - 1}"
            )
        layers = range(self._layout.n_layers, self._layout.page_layers)
        rows = gather_run(
            self._layout, range(start, stop), lambda pages: self.pages(state, pages), layers
        )
        return rows.transpose(0, 1)

    def keys_between(self, state: StoredSession, begin: int, end: int) -> Tensor:
        """Copy the keys of positions begin..end-1, all in one page, without promotion.

        Returns `[n_layers, n_kv_heads, end - begin, head_dim]`. Raises RowRangeError when the
        session was truncated before `end`.
        """
        if end > state.length:
            raise RowRangeError(
                f"session {state.name!r} was truncated to {state.length} tokens during a scan "
                f"up to {end}"
            )
        index, offset = divmod(begin, self._layout.page_tokens)
        page = next(self.pages(state, [index], promote=False))
        return page[: self._layout.n_layers, 0].narrow(2, offset, end - begin).clone()

    def read_keys(self, state: StoredSession, pages: Sequence[int]) -> ReadKeys:
        """Read the keys of pages without promotion.

        Raises RowRangeError for a page that the session does not have.
        """
        self.require_pages(state, pages)
        keys = list[Tensor]()
        bytes_read = 0
        page_tokens = self._layout.page_tokens
        fetched = self._fetch(state, pages, promote=False)
        for index, (rows, from_tier) in zip(pages, fetched, strict=True):
            bytes_read += HEADER_BYTES + rows.nbytes if from_tier else 0
            of_page = rows[: self._layout.n_layers, 0]
            filled = state.length - index * page_tokens
            if filled < page_tokens:  # It may be written to while the keys are in use.
                of_page = of_page[:, :, :filled].clone()
            keys.append(of_page)
        return ReadKeys(keys, bytes_read)

    def read_verified(self, state: StoredSession, index: int) -> tuple[Tensor, bool]:
        """Read a page; also return whether it is queued or in the tier that must hold it.

        Raises a PageError for a missing page, and a tier's error when it does not answer.
        """
        rows = self._get_in_memory(state, index)
        if rows is not None:
            return rows, True
        [page_id] = self._expect(state, [index])
        return self._stack.read_verified(page_id)

    def pages(
        self, state: StoredSession, pages: Sequence[int], *, promote: bool = True
    ) -> Iterator[Tensor]:
        """Yield the rows of pages in the given order, read in batches.

        Each is `[n_layers, 2, n_kv_heads, t, head_dim]`, full-size for the unfinished page.
        """
        return (rows for rows, _ in self._fetch(state, pages, promote=promote))

    def hold(self, state: StoredSession, pages: Sequence[int]) -> list[Tensor]:
        """Read pages as `pages` yields them, in memory that lasts as long as its readers.

        Where the fastest tier is memory, its own: nothing is copied. Raises RowRangeError for a page that
        the session does not have.
        """
        self.require_pages(state, pages)
        in_memory = {
            index: rows
            for index in pages
            if (rows := self._get_in_memory(state, index)) is not None
        }
        below = [index for index in pages if index not in in_memory]
        read = self._stack.hold(self._expect(state, below))
        found = in_memory | dict(zip(below, read, strict=True))
        return [found[index] for index in pages]

    def require_pages(self, state: StoredSession, pages: Sequence[int]) -> None:
        """Raise RowRangeError unless the session has these pages."""
        count = -(-state.length // self._layout.page_tokens)
        if pages and not 0 <= min(pages) <= max(pages) < count:
            raise RowRangeError(
                f"pages of session {state.name!r} must lie in 0..{count - 1}, "
                f"got {min(pages)}..{max(pages)}"
            )

    def _fetch(
        self, state: StoredSession, pages: Sequence[int], *, promote: bool
    ) -> Iterator[tuple[Tensor, bool]]:
        """Yield as `pages`, each with whether it was read from a tier."""
        for first in range(0, len(pages), self._batch_pages):
            batch = pages[first : first + self._batch_pages]
            in_memory = {
                index: rows
                for index in batch
                if (rows := self._get_in_memory(state, index)) is not None
            }
            below = [index for index in batch if index not in in_memory]
            from_tiers = self._stack.read(self._expect(state, below), promote=promote)
            read = dict(zip(below, from_tiers, strict=True))
            for index in batch:
                if index in in_memory:
                    yield in_memory[index], False
                else:
                    yield read[index], True

    def _expect(self, state: StoredSession, indices: Sequence[int]) -> list[PageId]:
        """Ids of pages by index. Raises MissingPageError for one that is not there."""
        if not state.missing.isdisjoint(state.pages[index] for index in indices):
            find_restored(self._context, state)
        return state.expect(indices)

    def _get_in_memory(self, state: StoredSession, index: int) -> Tensor | None:
        if index >= len(state.pages):
            return state.behind[index - len(state.pages)]
        queued = self._writer.get_queued(state.pages[index])
        return None if queued is None else queued.rows
