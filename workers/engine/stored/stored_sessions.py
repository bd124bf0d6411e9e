"""Sessions of a worker in its row store, and in a second one for recurrent states.

A state is a page of one row there, under the id of the page of rows that it follows: so sharing,
durability and deletion are those of rows.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvrecall.domain.page_ids import PageId
from kvstore.errors import MissingPageError
from kvstore.format.page import PageLayout
from kvstore.hierarchy.group_commit import then
from kvstore.hierarchy.metered import TierStatus
from kvstore.store import RowStore

# Numbers of a vector that a state's bytes are laid out in.
_WIDTH = 4096


def build_state_layout(state_bytes: int, fingerprint: str) -> PageLayout:
    """Build the layout of a store of recurrent states of so many bytes each."""
    numbers = -(-state_bytes // torch.float32.itemsize)
    width = min(numbers, _WIDTH)
    return PageLayout(
        n_layers=-(-numbers // width),
        n_kv_heads=1,
        head_dim=width,
        dtype=torch.float32,
        fingerprint=f"{fingerprint} states",
        page_tokens=1,
        latent=True,
    )


class StoredSessions:
    """The stored sessions of one worker.

    Attributes:
        rows: The store of their rows.
        states: The store of their recurrent states; None for a model without.
    """

    def __init__(self, rows: RowStore, states: RowStore | None = None) -> None:
        """Serve sessions over one store or two."""
        self.rows = rows
        self.states = states
        self._page_tokens = rows.layout.page_tokens

    def open(
        self, session: str, pages: Sequence[PageId], snapshots: Sequence[int], key: bytes = b""
    ) -> None:
        """Open a session with exactly these pages, and its states. Raises as `RowStore.open`.

        snapshots: rows before each state, ascending. key: as of `RowStore.open`.
        """
        self.rows.open(session, pages, key)
        if self.states is not None:
            self.states.open(session, [self._name_state(pages, at) for at in snapshots], key)

    def find_prefix(self, pages: Sequence[PageId]) -> int:
        """Count the first of these pages that are stored. Raises the lowest tier's error."""
        found = self.rows.contains(pages)
        return found.index(False) if False in found else len(found)

    def find_states(self, pages: Sequence[PageId]) -> list[int]:
        """Find the pages that a stored state follows; returns the rows before each state."""
        if self.states is None:
            return []
        found = self.states.contains(pages)
        return [(index + 1) * self._page_tokens for index, has in enumerate(found) if has]

    def find_intact(
        self, session: str, snapshots: Sequence[int], *, verify: bool = False
    ) -> tuple[int, ...]:
        """Find the positions of the states that are not known to be lost; `verify`: by reading them.

        What `verify` reads it repairs. Raises as `RowStore.repair_pages`.
        """
        if self.states is None:
            return ()
        find_missing = self.states.repair_pages if verify else self.states.missing_pages
        missing = set(find_missing(session))
        return tuple(at for index, at in enumerate(snapshots) if index not in missing)

    def read_state(
        self, session: str, length: int, snapshots: Sequence[int], nbytes: int
    ) -> Tensor:
        """Read the state after `length` tokens, uint8 `[nbytes]`. Raises as `RowStore.gather`."""
        assert self.states is not None, "only models with recurrent states have them stored"
        if length not in snapshots:
            raise MissingPageError(
                f"session {session!r} has no recurrent state after {length} tokens; it must be "
                "computed again"
            )
        index = list(snapshots).index(length)
        rows = self.states.gather(session, torch.tensor([index]))
        return rows.flatten().view(torch.uint8)[:nbytes]

    def read_pages(
        self, reader: str, pages: Sequence[PageId], key: bytes, positions: Tensor
    ) -> Tensor:
        """Read rows of pages that other sessions have, as `RowStore.gather` does of a session of these pages.

        reader: the name that holds them meanwhile, of no session. key: as of `RowStore.open`.
        """
        self.rows.open(reader, pages, key)
        try:
            return self.rows.gather(reader, positions)
        finally:
            self.rows.close_session(reader)

    def append_state(self, session: str, page: PageId, packed: Tensor) -> None:
        """Append a state, uint8 `[nbytes]`, which follows a page. Raises as `RowStore.append`."""
        assert self.states is not None, "only models with recurrent states have them stored"
        self.states.append(session, self._lay_out(packed), [page])

    def restore_state(self, session: str, index: int, packed: Tensor) -> None:
        """Write a lost state again. Raises as `RowStore.restore`."""
        assert self.states is not None, "only models with recurrent states have them stored"
        self.states.restore(session, index, self._lay_out(packed))

    def drop_state(self, session: str, index: int) -> None:
        """Drop one of a session's states, and delete it unless another open session has it."""
        assert self.states is not None, "only models with recurrent states have them stored"
        self.states.drop_page(session, index)

    def truncate(self, session: str, length: int, states: int) -> None:
        """Cut a session to its first `length` rows and so many states. Raises RowRangeError."""
        self.rows.truncate(session, length)
        if self.states is not None:
            self.states.truncate(session, states)

    def begin_flush(self, session: str) -> "Future[bool]":
        """Begin to make rows and states durable, as `RowStore.begin_flush`."""
        if self.states is None:
            return self.rows.begin_flush(session)
        states = self.states.begin_flush(session)
        return then(self.rows.begin_flush(session), lambda durable: states.result() and durable)

    def delete(self, pages: Sequence[PageId]) -> "Future[frozenset[PageId]]":
        """Delete pages and the states that follow them, as `RowStore.delete`; the result is pages."""
        rows = self.rows.delete(pages)
        if self.states is None:
            return rows
        states = self.states.delete(pages)

        def finish(deleted: frozenset[PageId]) -> frozenset[PageId]:
            states.result()
            return deleted

        return then(rows, finish)

    def list_pages(self, older_than_seconds: float = 0.0) -> set[PageId]:
        """List pages and states by id, as `RowStore.list_pages`."""
        listed = (store.list_pages(older_than_seconds) for store in self._stores())
        return set[PageId]().union(*listed)

    def release(self, session: str) -> None:
        """Forget a session that continues in another process."""
        for store in self._stores():
            store.release(session)

    def close_session(self, session: str) -> None:
        """Forget an open session; its pages stay in all tiers."""
        for store in self._stores():
            store.close_session(session)

    def tiers(self) -> dict[str, TierStatus]:
        """Contents and activity of each tier by its name; those of states begin with `states-`."""
        states = {} if self.states is None else self.states.tiers()
        return self.rows.tiers() | {f"states-{name}": tier for name, tier in states.items()}

    def count_pending(self) -> tuple[int, int]:
        """Count pages and states that are not in the lowest tier, and those in memory alone."""
        counts = [store.count_pending() for store in self._stores()]
        return sum(pending for pending, _ in counts), sum(undurable for _, undurable in counts)

    def close(self) -> None:
        """Close both stores. Raises as `RowStore.close`, once both are closed."""
        try:
            if self.states is not None:
                self.states.close()
        finally:
            self.rows.close()

    def _name_state(self, pages: Sequence[PageId], position: int) -> PageId:
        """Name the state after `position` rows: by the last page of these."""
        return pages[position // self._page_tokens - 1]

    def _lay_out(self, packed: Tensor) -> Tensor:
        """Lay bytes out as the one row of a page."""
        assert self.states is not None, "only models with recurrent states have them stored"
        layout = self.states.layout
        shape = layout.rows_shape(1)
        missing = layout.row_bytes - packed.numel()
        return pad(packed, (0, missing)).view(torch.float32).view(shape)

    def _stores(self) -> Iterable[RowStore]:
        return (self.rows,) if self.states is None else (self.rows, self.states)
