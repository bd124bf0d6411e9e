"""Rows of one session in host memory, in its pages as the row store holds them: nothing is copied."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvstore.format.gather import gather_selection
from kvstore.format.page import PageLayout


class PagedRows:
    """The first rows of one session, in every layer and KV head.

    Attributes:
        length: Rows per layer and KV head: those of the positions before it.
        pages: `[page_layers, parts, n_kv_heads, page_tokens, head_dim]` each, contiguous. The last one may
            have any numbers behind the rows.
        addresses: Of the pages' memory, int64 `[n_pages]`.
    """

    def __init__(self, layout: PageLayout) -> None:
        """Begin without rows; layout: of the pages."""
        self.layout = layout
        self.length = 0
        self.pages: list[Tensor] = []
        self.addresses = torch.empty(0, dtype=torch.int64)

    @property
    def nbytes(self) -> int:
        """Bytes of the pages, which other sessions may hold too."""
        return len(self.pages) * self.pages[0].nbytes if self.pages else 0

    def append(self, pages: Sequence[Tensor], length: int) -> None:
        """Add pages that follow whole ones, up to position `length`."""
        assert self.length == len(self.pages) * self.layout.page_tokens, "no page is cut inside"
        self.pages.extend(pages)
        added = torch.tensor([page.data_ptr() for page in pages], dtype=torch.int64)
        self.addresses = torch.cat([self.addresses, added])
        self.length = length

    def truncate(self, length: int) -> None:
        """Drop the rows from position `length` on; nothing happens if there are none."""
        self.length = min(self.length, length)
        pages = -(-self.length // self.layout.page_tokens)
        del self.pages[pages:]
        self.addresses = self.addresses[:pages]

    def keys(self, layer: int, rows: slice = slice(None)) -> Tensor:
        """Join a layer's keys, or some of them, `[n_kv_heads, n, head_dim]`."""
        return self._join(slice(layer, layer + 1), 0, rows)[0]

    def all_keys(self, rows: slice) -> Tensor:
        """Join some keys of all layers, `[n_layers, n_kv_heads, n, head_dim]`."""
        return self._join(slice(self.layout.n_layers), 0, rows)

    def rows(self, layer: int) -> tuple[Tensor, Tensor]:
        """Join a layer's keys and values, `[n_kv_heads, length, head_dim]`."""
        keys = self.keys(layer)
        return keys, keys if self.layout.latent else self._join(slice(layer, layer + 1), 1)[0]

    def split_rows(self, layer: int) -> tuple[list[Tensor], list[Tensor]]:
        """Split a layer's keys and values by pages: views, `[n_kv_heads, n, head_dim]` each."""
        keys = [page[0] for page in self._split(slice(layer, layer + 1), 0, slice(None))]
        if self.layout.latent:
            return keys, keys
        return keys, [page[0] for page in self._split(slice(layer, layer + 1), 1, slice(None))]

    def gather(self, layer: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Gather positions, int64 `[n_kv_heads, m]`, -1 for none, which yields zeros.

        Returns keys and values `[n_kv_heads, m, head_dim]`.
        """
        layers = range(layer, layer + 1)
        return gather_selection(self.layout, [positions], self.length, self._read, layers)[0]

    def gather_selection(
        self, _session: str, selection: Sequence[Tensor]
    ) -> list[tuple[Tensor, Tensor]]:
        """Gather positions of all layers, int64 `[n_kv_heads, m]` each, as `gather`.

        A source of this session's rows as the row store is one of all sessions'.
        """
        layers = range(self.layout.n_layers)
        return gather_selection(self.layout, selection, self.length, self._read, layers)

    def _read(self, pages: Sequence[int]) -> Iterator[Tensor]:
        return (self.pages[index] for index in pages)

    def _join(self, layers: slice, part: int, rows: slice = slice(None)) -> Tensor:
        """Join some rows of one part of some layers, `[layers, n_kv_heads, n, head_dim]`."""
        return torch.cat(self._split(layers, part, rows), 2)

    def _split(self, layers: slice, part: int, rows: slice) -> list[Tensor]:
        """Split some rows of one part of some layers by pages, as `_join`."""
        start, stop, _ = rows.indices(self.length)
        tokens = self.layout.page_tokens
        first = start // tokens
        pages = self.pages[first : -(-stop // tokens)]
        if not pages:
            layout = self.layout
            count = len(range(layout.n_layers)[layers])
            shape = (count, layout.n_kv_heads, 0, layout.head_dim)
            return [torch.empty(shape, dtype=layout.dtype)]
        split = [page[layers, part] for page in pages]
        split[-1] = split[-1][:, :, : stop - (first + len(pages) - 1) * tokens]
        split[0] = split[0][:, :, start - first * tokens :]
        return split
