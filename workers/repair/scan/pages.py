"""A session's pages as chunks of keys on the device: read from tiers, or from their summaries."""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvstore.format.page import PageLayout
from kvstore.format.summaries import PageSummary, get_midpoints, unpack_codes
from kvstore.sessions.gather import ReadKeys
from workers.cache.transfers import Transfers
from workers.repair.key_chunks import CHUNK_ROWS
from workers.repair.scan.softmax import Signal

# Pages whose bounding boxes are compared with the queries at once.
_BOXES_AT_ONCE = 256


class PageSource(Protocol):
    """A source of a session's pages: `kvstore.store.RowStore`, or one with the same methods."""

    @property
    def layout(self) -> PageLayout:
        """Shape of a page."""
        ...

    def read_keys(self, session: str, pages: Sequence[int]) -> ReadKeys:
        """Read the keys of pages by index."""
        ...

    def summaries(self, session: str, pages: Sequence[int]) -> list[PageSummary | None]:
        """Look up the summaries of pages by index; None for a page without one."""
        ...


@dataclass(frozen=True, eq=False)
class ReadChunk:
    """Keys of some pages, as they were read.

    Attributes:
        pages: Indices of the pages.
        positions: Positions of the rows, int64 `[rows]`.
        keys: `[n_layers, n_kv_heads, rows, head_dim]`.
    """

    pages: Sequence[int]
    positions: Tensor
    keys: Tensor

    def get_layer(self, layer: int) -> Tensor:
        """A layer's keys, `[n_kv_heads, rows, head_dim]`."""
        return self.keys[layer]


@dataclass(frozen=True, eq=False)
class CodedChunk:
    """Full pages, as approximated by their summaries (see `PageSummary`).

    Attributes:
        pages: Indices of the pages.
        positions: Positions of the rows, int64 `[rows]`.
        lowest: Lower corners of the boxes, float32 `[n_layers, n_kv_heads, pages, head_dim]`.
        bin_width: Widths of the quantisation bins, of the same shape.
        max_error: Largest distances of keys from their bins' midpoints, of the same shape.
        high: Upper parts of the codes, uint8 `[n_layers, n_kv_heads, rows, ...]`, or None.
        low: Lower parts of the codes, uint8 `[n_layers, n_kv_heads, rows, ...]`, or None.
    """

    pages: Sequence[int]
    positions: Tensor
    lowest: Tensor
    bin_width: Tensor
    max_error: Tensor
    high: Tensor | None
    low: Tensor | None

    def get_layer(self, layer: int) -> Tensor:
        """Midpoints of the bins of a layer's keys: float32 `[n_kv_heads, rows, head_dim]`."""
        lowest = self.lowest[layer].unsqueeze(2)
        bin_width = self.bin_width[layer].unsqueeze(2)
        high, low = (None if part is None else part[layer] for part in (self.high, self.low))
        codes = unpack_codes(high, low, lowest.shape[-1])
        heads, rows, head_dim = codes.shape
        midpoints = get_midpoints(
            codes.view(heads, len(self.pages), -1, head_dim), lowest, bin_width
        )
        return midpoints.view(heads, rows, head_dim)


Chunk = ReadChunk | CodedChunk


class Pages:
    """The pages of a session's first `length` tokens; reads raise the errors of the store.

    Attributes:
        count: Number of pages.
        bytes_read: Bytes read so far.
        chunk_pages: Pages on the device at once.
    """

    def __init__(
        self, store: PageSource, name: str, length: int, signal: Signal, transfers: Transfers
    ) -> None:
        """Address the pages of session `name`, to be scored against `signal`; nothing is read."""
        self._store = store
        self._name = name
        self.length = length
        self._signal = signal
        self._device = transfers.device
        self._transfers = transfers
        self.page_tokens = store.layout.page_tokens
        self.count = -(-length // self.page_tokens)
        self.bytes_read = 0
        self.chunk_pages = max(1, signal.rows_at_once(CHUNK_ROWS) // self.page_tokens)
        self._boxes_at_once = signal.rows_at_once(_BOXES_AT_ONCE, layers=signal.n_layers)

    def read(self, pages: Sequence[int]) -> ReadChunk:
        """Read the keys of pages from the tiers."""
        found = self._store.read_keys(self._name, pages)
        self.bytes_read += found.bytes_read
        keys = [
            each[:, :, : self._tokens(page)] for page, each in zip(pages, found.keys, strict=True)
        ]
        joined = torch.cat(keys, dim=2)
        return ReadChunk(pages, self._positions(pages), *self._transfers.to_device([joined]))

    def approximate(self, pages: Sequence[int]) -> Iterator[Chunk]:
        """Approximate pages by their summaries; read pages without a summary.

        An unfinished page has no summary.
        """
        pairs = list(zip(pages, self.summaries(pages), strict=True))
        known = [(page, summary) for page, summary in pairs if summary is not None]
        unknown = [page for page, summary in pairs if summary is None]
        if known:
            yield self._decode([page for page, _ in known], [summary for _, summary in known])
        if unknown:
            yield self.read(unknown)

    def summaries(self, pages: Sequence[int]) -> list[PageSummary | None]:
        """Look up the summaries of pages; None for a page that `length` ends in the middle of."""
        found = self._store.summaries(self._name, pages)
        full = self.length // self.page_tokens
        return [each if page < full else None for page, each in zip(pages, found, strict=True)]

    def in_chunks(self, pages: Sequence[int]) -> Iterator[Sequence[int]]:
        """Split pages into chunks that fit on the device at once."""
        for first in range(0, len(pages), self.chunk_pages):
            yield pages[first : first + self.chunk_pages]

    def rows_of(self, pages: Sequence[int]) -> slice:
        """Positions of the rows of consecutive pages."""
        stop = min(self.length, (pages[-1] + 1) * self.page_tokens)
        return slice(pages[0] * self.page_tokens, stop)

    def best_first(self, stop_requested: Callable[[], bool]) -> Generator[None, None, list[int]]:
        """Order all pages: those without a summary, then by the bound on a key's attention.

        The bound is the box's: no key's logit is over
        `sum over channels of max(q * lowest, q * highest)`. Yields between batches of pages. Once a
        stop is requested, the order is arbitrary.

        Source: Quest (Tang et al., 2024), section 3.3.
        """
        peaks: list[Tensor] = []
        for _, logits in self._box_logits():
            highest = [each.amax(-1, keepdim=True) for each in logits]
            peaks = list(map(torch.maximum, peaks, highest)) if peaks else highest
            yield None
            if stop_requested():
                return list(range(self.count))
        bounds = torch.full((self.count,), torch.inf)
        for pages, logits in self._box_logits():
            weights = [each.sub_(peak).exp_() for each, peak in zip(logits, peaks, strict=True)]
            # The signal's attention bounds a score with a contrast, too.
            attention = torch.stack([self._signal.attention(each, None) for each in weights])
            bounds[pages] = self._signal.signal_attention(attention.sum(0)).cpu()
            yield None
            if stop_requested():
                break
        order: list[int] = bounds.sort(descending=True, stable=True).indices.tolist()
        return order

    def _box_logits(self) -> Iterator[tuple[list[int], list[Tensor]]]:
        """Bounds on the logits of pages that have a summary, in batches.

        Yields the pages, and per layer `[n_kv_heads, group * t, pages]`.
        """
        for first in range(0, self.count, self._boxes_at_once):
            pages = range(first, min(self.count, first + self._boxes_at_once))
            pairs = list(zip(pages, self.summaries(pages), strict=True))
            known = [(page, summary) for page, summary in pairs if summary is not None]
            if not known:
                continue
            lowest = torch.stack([summary.lowest for _, summary in known], 2).to(self._device)
            highest = torch.stack([summary.highest for _, summary in known], 2).to(self._device)
            centre = ((lowest + highest) / 2).transpose(2, 3)
            half = ((highest - lowest) / 2).transpose(2, 3)
            bounds = []
            for layer in range(self._signal.n_layers):
                queries = self._signal.queries(layer)
                bounds.append(queries @ centre[layer] + queries.abs() @ half[layer])
            yield [page for page, _ in known], bounds

    def _decode(self, pages: Sequence[int], summaries: Sequence[PageSummary]) -> CodedChunk:
        return CodedChunk(
            pages,
            self._positions(pages),
            self._stack([summary.lowest for summary in summaries]),
            self._stack([summary.bin_width for summary in summaries]),
            self._stack([summary.max_error for summary in summaries]),
            self._join([summary.high for summary in summaries]),
            self._join([summary.low for summary in summaries]),
        )

    def _stack(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(parts), 2).to(self._device)

    def _join(self, parts: Sequence[Tensor | None]) -> Tensor | None:
        existing = [part for part in parts if part is not None]
        return torch.cat(existing, dim=2).to(self._device) if existing else None

    def _tokens(self, page: int) -> int:
        return min(self.page_tokens, self.length - page * self.page_tokens)

    def _positions(self, pages: Sequence[int]) -> Tensor:
        parts = [torch.arange(self._tokens(page)) + page * self.page_tokens for page in pages]
        return torch.cat(parts).to(self._device)
