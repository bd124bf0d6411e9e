"""Arena of a session's rows: contiguous host memory from which single rows are read every token."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvstore.format.page import PageLayout
from kvstore.index.arrays import gather_runs

# Capacities are a multiple of it, in rows per layer and KV head.
_GRANULE = 1024
# An arena that is full grows to so many times its rows.
_GROWTH = 1.5


class RowArena:
    """The first rows of one session, position by position, in every layer and KV head.

    A copy of what the row store has, in its dtype: it may be dropped at any time and read again. Of
    latents, which are keys and values at once, there is one copy.
    Reading a few hundred rows from here costs a hundredth of gathering them from pages.

    Attributes:
        length: Rows per layer and KV head: those of the positions before it.
    """

    def __init__(self, layout: PageLayout) -> None:
        """Create an empty arena; layout: of the store's rows."""
        self._layout = layout
        self.length = 0
        self._layers = [self._allocate(0) for _ in range(layout.n_layers)]

    @property
    def nbytes(self) -> int:
        """Bytes of memory that are allocated."""
        return sum(rows.nbytes for rows in self._layers)

    @staticmethod
    def bytes_for(layout: PageLayout, length: int) -> int:
        """Most bytes that an arena of `length` rows allocates."""
        return int(layout.row_bytes * (_GROWTH * length + _GRANULE))

    def reserve(self, length: int) -> None:
        """Allocate memory for `length` rows at once, at most `bytes_for` of them."""
        for layer, rows in enumerate(self._layers):
            if length > rows.shape[2]:
                self._grow(layer, length)

    def append(self, layers: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Append rows: per layer keys and values `[n_kv_heads, m, head_dim]`, copied."""
        added = layers[0][0].shape[1]
        stop = self.length + added
        self.reserve(stop)
        for layer, pair in enumerate(layers):
            for into, rows in zip(self._layers[layer], pair, strict=False):
                into[:, self.length : stop] = rows
        self.length = stop

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put rows `[n_kv_heads, m, head_dim]` of one layer behind the arena's, for one use.

        They are not the arena's: the next `append` writes over them. There must be room for them
        (`reserve`). Returns views of keys and values `[n_kv_heads, length + m, head_dim]`.
        """
        stop = self.length + keys.shape[1]
        rows = self._layers[layer]
        assert stop <= rows.shape[2], "room was reserved for the rows"
        for into, own in zip(rows, (keys, values), strict=False):
            into[:, self.length : stop] = own
        return rows[0, :, :stop], rows[-1, :, :stop]

    def truncate(self, length: int) -> None:
        """Drop the rows from position `length` on; nothing happens if there are none."""
        self.length = min(self.length, length)

    def rows(self, layer: int) -> tuple[Tensor, Tensor]:
        """Views of a layer's keys and values, as `keys`."""
        rows = self._layers[layer][:, :, : self.length]
        return rows[0], rows[-1]

    def keys(self, layer: int) -> Tensor:
        """A view of a layer's keys, `[n_kv_heads, length, head_dim]`, until the next `append`."""
        return self._layers[layer][0, :, : self.length]

    def gather(self, layer: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Gather positions, int64 `[n_kv_heads, m]`, -1 for none, which yields any row.

        Returns keys and values `[n_kv_heads, m, head_dim]`.
        """
        rows = self._layers[layer]
        keys = _select(rows[0], positions)
        return keys, keys if self._layout.latent else _select(rows[1], positions)

    def gather_keys(self, layer: int, positions: Tensor) -> Tensor:
        """Gather keys alone, as `gather`."""
        return _select(self._layers[layer][0], positions)

    def gather_key_runs(self, layer: int, runs: Tensor, length: int) -> Tensor:
        """Gather the keys of runs of `length` positions each, a power of 2 up to 1,024.

        runs: int64 `[n_kv_heads, m]`; run i begins at position `i * length`. Returns
        `[n_kv_heads, m * length, head_dim]`, any numbers behind the arena's end.
        """
        return gather_runs(self._layers[layer][0], runs, length)

    def _grow(self, layer: int, length: int) -> None:
        old = self._layers[layer]
        grown = self._allocate(-(-int(_GROWTH * length) // _GRANULE) * _GRANULE)
        grown[:, :, : self.length] = old[:, :, : self.length]
        self._layers[layer] = grown

    def _allocate(self, capacity: int) -> Tensor:
        layout = self._layout
        shape = (layout.parts, layout.n_kv_heads, capacity, layout.head_dim)
        return torch.empty(shape, dtype=self._layout.dtype)


def _select(rows: Tensor, positions: Tensor) -> Tensor:
    """Select positions, int64 `[heads, m]`, of rows `[heads, capacity, head_dim]`."""
    heads, capacity, head_dim = rows.shape
    first = capacity * torch.arange(heads)[:, None]
    indices = (first + positions.clamp(min=0)).flatten()
    return rows.reshape(-1, head_dim).index_select(0, indices).view(heads, -1, head_dim)
