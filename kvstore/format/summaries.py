"""Bounds on the keys of a page, kept in memory: enough to tell most rows from each other without reading the page.

A summary is an index: it is made from a page, never the other way round, and may be missing at any time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Literal

import torch
from torch import Tensor

from kvstore.format.page import PageKey
from kvstore.format.page_table import ExpectedPage

Bits = Literal[4, 8, 12]
"""Of a code: how finely a page's box is divided in every channel."""

_ROUNDING = 2.0**-22
"""Another processor may round a middle otherwise, by a unit in the last place or two of the box's largest value."""


@dataclass(frozen=True, eq=False)
class PageSummary:
    """The box of a page's keys in every layer, KV head and channel, and for every key the cell in which it lies.

    lowest, cell, reach: float32 `[n_layers, n_kv_heads, head_dim]`: where the box begins, how wide one of its
    `2 ** bits` cells is, and how far at most a key of this page is from the middle of its cell (measured; half a cell
    and rounding). high: uint8 `[n_layers, n_kv_heads, tokens, head_dim]`, the codes' upper eight bits; low: uint8
    `[n_layers, n_kv_heads, tokens, (head_dim + 1) // 2]`, the lower four, of the first half of the channels and of the
    second in one byte. Codes of 8 bits have no `low`, codes of 4 bits no `high`.
    """

    lowest: Tensor
    cell: Tensor
    reach: Tensor
    high: Tensor | None
    low: Tensor | None

    @property
    def highest(self) -> Tensor:
        """Where the box ends, as `lowest`, but for rounding."""
        return self.lowest + self.cell * (
            1 << (0 if self.high is None else 8) + (0 if self.low is None else 4)
        )

    @property
    def bytes(self) -> int:
        """Bytes in memory."""
        parts = (self.lowest, self.cell, self.reach, self.high, self.low)
        return sum(part.nbytes for part in parts if part is not None)


def summarise(keys: Tensor, bits: Bits) -> PageSummary | None:
    """The summary of keys `[n_layers, n_kv_heads, tokens, head_dim]`; None when a key is not finite."""
    keys = keys.float()
    lowest = keys.amin(2, keepdim=True)
    highest = keys.amax(2, keepdim=True)
    cell = (highest - lowest) / (1 << bits)
    if not bool(cell.isfinite().all()):
        return None
    # A box without width has one cell; any code would do.
    codes = ((keys - lowest) / torch.where(cell > 0, cell, 1.0)).floor_().clamp_(0, (1 << bits) - 1)
    middles = middles_of(codes, lowest, cell)
    largest = torch.maximum(lowest.abs(), highest.abs())
    reach = (keys - middles).abs_().amax(2, keepdim=True) + largest * _ROUNDING
    high, low = _pack(codes.to(torch.int16), bits)
    return PageSummary(lowest.squeeze(2), cell.squeeze(2), reach.squeeze(2), high, low)


def middles_of(codes: Tensor, lowest: Tensor, cell: Tensor) -> Tensor:
    """The middles of cells, float32; all float32 of shapes that fit each other."""
    return (codes + 0.5).mul_(cell).add_(lowest)


def unpacked(high: Tensor | None, low: Tensor | None, head_dim: int) -> Tensor:
    """Codes as `PageSummary` packs them, on whatever device: float32 `[..., tokens, head_dim]`."""
    if low is None:
        assert high is not None, "a code has an upper or a lower part"
        return high.float()
    fine = torch.cat([low & 15, low >> 4], dim=-1)[..., :head_dim].float()
    return fine if high is None else fine.add_(high, alpha=16)


def _pack(codes: Tensor, bits: Bits) -> tuple[Tensor | None, Tensor | None]:
    if bits == 8:
        return codes.to(torch.uint8), None
    fine = codes & 15
    half = (codes.shape[-1] + 1) // 2
    upper = torch.nn.functional.pad(fine[..., half:], (0, 2 * half - codes.shape[-1]))
    low = (fine[..., :half] | upper << 4).to(torch.uint8)
    return ((codes >> 4).to(torch.uint8) if bits == 12 else None), low


class PageSummaries:
    """The summaries of a store's pages, at most `limit_bytes` of them; pages that come later then have none.

    Safe to call from several threads.
    """

    def __init__(self, limit_bytes: int, bits: Bits) -> None:
        self._limit_bytes = limit_bytes
        self._bits: Bits = bits
        self._held: dict[PageKey, tuple[int, PageSummary]] = {}
        self._bytes = 0
        self._lock = Lock()

    @property
    def bytes(self) -> int:
        """Bytes of all summaries."""
        return self._bytes

    def of(self, page: ExpectedPage) -> PageSummary | None:
        """The summary of this version of the page, if there is one."""
        sequence, summary = self._held.get(page.key, (0, None))
        return summary if sequence == page.sequence else None

    def make(self, page: ExpectedPage, keys: Tensor) -> None:
        """Summarise a version of a page, `[n_layers, n_kv_heads, tokens, head_dim]`, instead of an older one.

        It is left out when there is one, or no room.
        """
        if self._held.get(page.key, (-1, None))[0] >= page.sequence:
            return
        self.forget([page.key])
        if self._bytes >= self._limit_bytes:
            return
        summary = summarise(keys, self._bits)
        with self._lock:
            if (
                summary is None
                or self._bytes + summary.bytes > self._limit_bytes
                or page.key in self._held
            ):
                return
            self._held[page.key] = page.sequence, summary
            self._bytes += summary.bytes

    def forget(self, keys: Sequence[PageKey]) -> None:
        """Drop the summaries of pages that were deleted or are written anew."""
        with self._lock:
            for key in keys:
                _, summary = self._held.pop(key, (0, None))
                self._bytes -= summary.bytes if summary else 0
