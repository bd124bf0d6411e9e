"""Page summaries: bounds on the keys of a page, kept in memory.

They separate most rows by their attention scores without reading the page. A summary is an index:
it is derived from a page and may be absent at any time.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvstore.format.page import PageKey
from kvstore.format.page_table import ExpectedPage
from kvstore.host_cache import HostCache

Bits = Literal[4, 8, 12]
"""Bits of a code: a page's bounding box has `2 ** bits` bins in every channel."""

# Another processor may round a midpoint differently, by a unit or two in the last place of the
# largest value of the box.
_ROUNDING = 2.0**-22


@dataclass(frozen=True, eq=False)
class PageSummary:
    """Bounding box of a page's keys per layer, KV head and channel, and the bin of every key in it.

    Attributes:
        lowest: Lower bound of the box, float32 `[n_layers, n_kv_heads, head_dim]`.
        bin_width: Width of one of its `2 ** bits` bins, float32, same shape.
        max_error: Largest distance of a key of this page from the midpoint of its bin (measured;
            half a bin plus rounding), float32, same shape.
        high: Upper eight bits of the codes, uint8 `[n_layers, n_kv_heads, tokens, head_dim]`; None
            for codes of 4 bits.
        low: Lower four bits of the codes, uint8 `[n_layers, n_kv_heads, tokens,
            (head_dim + 1) // 2]`, of a channel of the first half and one of the second half in one
            byte; None for codes of 8 bits.
    """

    lowest: Tensor
    bin_width: Tensor
    max_error: Tensor
    high: Tensor | None
    low: Tensor | None

    @property
    def highest(self) -> Tensor:
        """Upper bound of the box up to rounding, float32, same shape as `lowest`."""
        return self.lowest + self.bin_width * (
            1 << (0 if self.high is None else 8) + (0 if self.low is None else 4)
        )

    @property
    def bytes(self) -> int:
        """Size in memory in bytes."""
        parts = (self.lowest, self.bin_width, self.max_error, self.high, self.low)
        return sum(part.nbytes for part in parts if part is not None)


def summarise(keys: Tensor, bits: Bits) -> PageSummary | None:
    """Summarise keys `[n_layers, n_kv_heads, tokens, head_dim]`; None when a key is not finite."""
    keys = keys.float()
    lowest = keys.amin(2, keepdim=True)
    highest = keys.amax(2, keepdim=True)
    bin_width = (highest - lowest) / (1 << bits)
    if not bool(bin_width.isfinite().all()):
        return None
    # A box of width zero has one bin, for which every code is right.
    divisor = torch.where(bin_width > 0, bin_width, 1.0)
    codes = ((keys - lowest) / divisor).floor_().clamp_(0, (1 << bits) - 1)
    largest = torch.maximum(lowest.abs(), highest.abs())
    error = (keys - get_midpoints(codes, lowest, bin_width)).abs_()
    max_error = error.amax(2, keepdim=True) + largest * _ROUNDING
    high, low = _pack_codes(codes.to(torch.int16), bits)
    return PageSummary(lowest.squeeze(2), bin_width.squeeze(2), max_error.squeeze(2), high, low)


def get_midpoints(codes: Tensor, lowest: Tensor, bin_width: Tensor) -> Tensor:
    """Midpoints of bins, float32; the arguments are float32 of shapes that broadcast."""
    return (codes + 0.5).mul_(bin_width).add_(lowest)


def unpack_codes(high: Tensor | None, low: Tensor | None, head_dim: int) -> Tensor:
    """Unpack the codes of a `PageSummary`, on any device, to float32 `[..., tokens, head_dim]`."""
    if low is None:
        assert high is not None, "a summary has upper or lower bits of its codes"
        return high.float()
    fine = torch.cat([low & 15, low >> 4], dim=-1)[..., :head_dim].float()
    return fine if high is None else fine.add_(high, alpha=16)


def _pack_codes(codes: Tensor, bits: Bits) -> tuple[Tensor | None, Tensor | None]:
    if bits == 8:
        return codes.to(torch.uint8), None
    fine = codes & 15
    half = (codes.shape[-1] + 1) // 2
    upper = torch.nn.functional.pad(fine[..., half:], (0, 2 * half - codes.shape[-1]))
    low = (fine[..., :half] | upper << 4).to(torch.uint8)
    return ((codes >> 4).to(torch.uint8) if bits == 12 else None), low


def get_summary_bytes(keys: Tensor, bits: Bits) -> int:
    """Bytes of the summary of keys `[n_layers, n_kv_heads, tokens, head_dim]`."""
    layers, heads, tokens, channels = keys.shape
    codes = (channels if bits != 4 else 0) + ((channels + 1) // 2 if bits != 8 else 0)
    return layers * heads * (3 * 4 * channels + tokens * codes)


class PageSummaries:
    """Summaries of a store's pages, in the host cache; where it has no room, pages have none.

    Safe to call from several threads.
    """

    def __init__(self, cache: HostCache, bits: Bits) -> None:
        self._cache = cache
        self._bits: Bits = bits
        # By session and index of the page: its version, and its summary.
        self._summaries: dict[str, dict[int, tuple[int, PageSummary]]] = {}
        cache.register("summaries", self._drop)

    @property
    def bytes(self) -> int:
        """Size of all summaries in bytes."""
        return self._cache.used_bytes["summaries"]

    def get(self, page: ExpectedPage) -> PageSummary | None:
        """Summary of this version of the page, if there is one."""
        sequence, summary = self._find(page.key) or (0, None)
        return summary if sequence == page.sequence else None

    def add(self, page: ExpectedPage, keys: Tensor) -> None:
        """Summarise the keys `[n_layers, n_kv_heads, tokens, head_dim]` of a version of a page.

        Replaces the summary of an older version. Does nothing when this version or a newer one has
        a summary, or when the cache has no room.
        """
        if (known := self._find(page.key)) and known[0] >= page.sequence:
            return
        self.discard([page.key])
        session = page.key.session
        needed = get_summary_bytes(keys, self._bits)
        if not self._cache.fits(session, "summaries", self._count(session) + needed):
            return
        summary = summarise(keys, self._bits)
        with self._cache.lock:
            if summary is None or self._find(page.key):
                return
            if self._cache.reserve(session, "summaries", self._count(session) + summary.bytes):
                of_session = self._summaries.setdefault(session, {})
                of_session[page.key.index] = page.sequence, summary

    def use(self, sessions: Iterable[str]) -> None:
        """Record that the summaries of these sessions' pages are read."""
        for session in sessions:
            self._cache.use(session)

    def discard(self, keys: Sequence[PageKey]) -> None:
        """Remove the summaries of pages that were deleted or are written again."""
        with self._cache.lock:
            for key in keys:
                of_session = self._summaries.get(key.session, {})
                _, summary = of_session.pop(key.index, (0, None))
                if summary is not None:
                    left = self._count(key.session) - summary.bytes
                    self._cache.reserve(key.session, "summaries", left)
                    if not of_session:
                        del self._summaries[key.session]

    def discard_session(self, session: str) -> None:
        """Remove the summaries of all of a session's pages."""
        with self._cache.lock:
            self._drop(session)
            self._cache.free(session, "summaries")

    def _find(self, key: PageKey) -> tuple[int, PageSummary] | None:
        return self._summaries.get(key.session, {}).get(key.index)

    def _count(self, session: str) -> int:
        """Bytes of the session's summaries."""
        return self._cache.get_bytes(session, "summaries")

    def _drop(self, session: str) -> None:
        self._summaries.pop(session, None)
