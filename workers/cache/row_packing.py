"""The form that rows of windows have in a page: that of further layers of the managed rows."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvstore.format.page import PageLayout
from workers.cache.side_cache import SideShape
from workers.cache.slot_pool import KVShape


def build_row_layout(
    shape: KVShape, side: SideShape | None, dtype: torch.dtype, fingerprint: str
) -> PageLayout:
    """Build the layout of pages of a model's rows, those of windows among them.

    fingerprint: of the weights.
    """
    windows = None if side is None else side.windows
    return PageLayout(
        n_layers=shape.n_layers,
        n_kv_heads=shape.n_kv_heads,
        head_dim=shape.head_dim,
        dtype=dtype,
        fingerprint=fingerprint,
        side_layers=0 if windows is None else RowPacking(windows, shape).n_layers,
        latent=shape.latent,
    )


class RowPacking:
    """Packs rows of one shape into layers of another, number by number and token by token.

    Where both have heads of one number and size, a layer stays a layer.

    Attributes:
        n_layers: Layers that the packed rows take.
    """

    def __init__(self, windows: KVShape, rows: KVShape) -> None:
        """Pack rows of `windows` into layers of `rows`."""
        self._windows = windows
        self._rows = rows
        self._alike = (windows.n_kv_heads, windows.head_dim) == (rows.n_kv_heads, rows.head_dim)
        self._numbers = windows.n_layers * windows.n_kv_heads * windows.head_dim
        per_layer = rows.n_kv_heads * rows.head_dim
        self.n_layers = -(-self._numbers // per_layer)
        self._padding = self.n_layers * per_layer - self._numbers

    def pack(self, rows: Tensor) -> Tensor:
        """Pack rows `[n_window_layers, 2, heads, t, dim]` into `[n_layers, 2, n_kv_heads, t, head_dim]`."""
        if self._alike:
            return rows
        tokens = rows.shape[3]
        flat = rows.permute(1, 3, 0, 2, 4).reshape(2, tokens, self._numbers)
        shape = (2, tokens, self.n_layers, self._rows.n_kv_heads, self._rows.head_dim)
        return pad(flat, (0, self._padding)).view(shape).permute(2, 0, 3, 1, 4)

    def unpack(self, packed: Tensor) -> Tensor:
        """Unpack what `pack` returned."""
        if self._alike:
            return packed
        windows, tokens = self._windows, packed.shape[3]
        flat = packed.permute(1, 3, 0, 2, 4).reshape(2, tokens, -1)[..., : self._numbers]
        shape = (2, tokens, windows.n_layers, windows.n_kv_heads, windows.head_dim)
        return flat.reshape(shape).permute(2, 0, 3, 1, 4)
