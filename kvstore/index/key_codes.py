"""Codes of a session's keys, a byte a number, by which a search scores all of them.

A number of a key is a whole one from -63 to 63, times the key's scale; one of a query from -127 to 127. Their
product is a whole number that every backend computes to the bit. Its error is made good where rows are drawn: a
row counts by the chance that it had, and attends with its own key (`workers.retrieval.sampling.draw`).
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from kvstore.format.page import PageId, PageLayout

# Rows and channels that lie together, so that one instruction scores eight rows by four channels.
_ROWS, _CHANNELS = 8, 4
_MOST_KEY, _MOST_QUERY = 63, 127
# Codes of keys are stored without a sign: products of bytes have one signed factor.
_OFFSET = 64
_TINY = torch.finfo(torch.float32).tiny

Encode = Callable[[PageLayout, Tensor], Tensor]
"""`encode_keys`, or what gives the same."""


class SharedCodes:
    """Codes of pages that sessions have in common: each once, for as long as one of them has it."""

    def __init__(self) -> None:
        self._codes = WeakValueDictionary[PageId, Tensor]()

    def get(self, page_id: PageId | None, encode: Callable[[], Tensor]) -> Tensor:
        """Get the codes of a page, encoded where no session has it; page_id: None for one that may change."""
        codes = None if page_id is None else self._codes.get(page_id)
        if codes is None:
            codes = encode()
            if page_id is not None:
                self._codes[page_id] = codes
        return codes


class KeyCodes:
    """Codes of the keys of one session's pages.

    Attributes:
        pages: The codes of each page, uint8 `[n]`.
        addresses: Theirs, int64 `[n_pages]`; another tensor after every change.
    """

    def __init__(
        self, layout: PageLayout, shared: SharedCodes, encode: Encode | None = None
    ) -> None:
        """Begin without pages; layout: of the pages; encode: faster than `encode_keys`, to the same bits."""
        self.addresses = torch.empty(0, dtype=torch.int64)
        self._layout = layout
        self._shared = shared
        self._encode = encode or encode_keys
        self.pages: list[Tensor] = []
        self._joined = dict[int, tuple[Tensor, Tensor]]()

    def __len__(self) -> int:
        return len(self.pages)

    @property
    def nbytes(self) -> int:
        """Bytes of the codes, which other sessions may have too."""
        return sum(page.nbytes for page in self.pages)

    @property
    def joined_bytes(self) -> int:
        """Bytes of what was joined."""
        return sum(codes.nbytes + scales.nbytes for codes, scales in self._joined.values())

    def append(self, ids: Sequence[PageId | None], pages: Sequence[Tensor]) -> None:
        """Add pages that follow, `PagedRows.pages`, with their ids; None for one that may change."""
        self._joined.clear()
        pairs = zip(ids, pages, strict=True)
        added = [
            self._shared.get(page_id, partial(self._encode, self._layout, rows))
            for page_id, rows in pairs
        ]
        self.pages += added
        addresses = torch.tensor([codes.data_ptr() for codes in added], dtype=torch.int64)
        self.addresses = torch.cat([self.addresses, addresses])

    def truncate(self, pages: int) -> None:
        """Drop all but the first pages."""
        if pages < len(self.pages):
            self._joined.clear()
            del self.pages[pages:]
            self.addresses = self.addresses[:pages]

    def join(self, layer: int) -> tuple[Tensor, Tensor]:
        """Join a layer's codes `[n_kv_heads, n, head_dim]`, and scales `[n_kv_heads, n]`, both in float32.

        Of all rows of the pages. They are kept, for torch, which reads them with each step, and multiplies
        whole numbers of no other type as fast.
        """
        if layer not in self._joined:
            parts = [split_codes(self._layout, page) for page in self.pages]
            scales = [scales[layer, :, : self._layout.page_tokens] for scales, _ in parts]
            codes = [self._line_up(codes[layer]) for _, codes in parts]
            self._joined[layer] = torch.cat(codes, 1), torch.cat(scales, 1)
        return self._joined[layer]

    def _line_up(self, blocks: Tensor) -> Tensor:
        """A page's codes with signs, float32 `[n_kv_heads, page_tokens, head_dim]`, of its blocks of them."""
        rows = blocks.transpose(2, 3).flatten(3).flatten(1, 2)
        return rows[:, : self._layout.page_tokens, : self._layout.head_dim].float() - _OFFSET


def encode_keys(layout: PageLayout, rows: Tensor) -> Tensor:
    """Encode the keys of a page's rows, `[page_layers, parts, n_kv_heads, page_tokens, head_dim]`.

    Returns bytes, uint8 `[n]`: scales, and behind them codes, in the shapes of `code_shapes`.
    """
    keys = rows[: layout.n_layers, 0].float().nan_to_num_()
    encoded = torch.zeros(code_bytes(layout), dtype=torch.uint8)
    scales, blocks = split_codes(layout, encoded)
    scale = keys.abs().amax(-1).div_(_MOST_KEY)
    scales[..., : layout.page_tokens] = scale
    codes = (keys / scale.clamp(min=_TINY)[..., None]).round_().add_(_OFFSET).to(torch.uint8)
    pad = (0, _fill(layout.head_dim, _CHANNELS), 0, _fill(layout.page_tokens, _ROWS))
    codes = torch.nn.functional.pad(codes, pad)
    by_rows = blocks.transpose(3, 4)
    by_rows.copy_(codes.view(by_rows.shape))
    return encoded


def encode_queries(queries: Tensor) -> tuple[Tensor, Tensor]:
    """Encode queries float32 `[..., head_dim]`: codes, whole numbers in float32, and scales `[...]`."""
    scales = queries.abs().amax(-1) / _MOST_QUERY
    return (queries / scales.clamp(min=_TINY)[..., None]).round_(), scales


def code_shapes(layout: PageLayout) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of a page's scales, float32, and of its codes, uint8.

    `[n_layers, n_kv_heads, rows]`, and in blocks `[n_layers, n_kv_heads, rows / 8, channels / 4, 8, 4]`.
    """
    rows = layout.page_tokens + _fill(layout.page_tokens, _ROWS)
    quads = (layout.head_dim + _fill(layout.head_dim, _CHANNELS)) // _CHANNELS
    heads = layout.n_layers, layout.n_kv_heads
    return (*heads, rows), (*heads, rows // _ROWS, quads, _ROWS, _CHANNELS)


def code_bytes(layout: PageLayout) -> int:
    """Bytes of the codes of a page."""
    scales, codes = map(math.prod, code_shapes(layout))
    return torch.float32.itemsize * scales + codes


def split_codes(layout: PageLayout, encoded: Tensor) -> tuple[Tensor, Tensor]:
    """Split a page's codes into views of scales and codes, in the shapes of `code_shapes`."""
    scales, codes = code_shapes(layout)
    end = torch.float32.itemsize * math.prod(scales)
    return encoded[:end].view(torch.float32).view(scales), encoded[end:].view(codes)


def _fill(count: int, step: int) -> int:
    """What is missing to a multiple of `step`."""
    return -count % step
