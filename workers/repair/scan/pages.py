"""A session's pages as chunks of keys on the device: read from the tiers, or as their summaries know them."""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvstore.format.summaries import PageSummary, middles_of, unpacked
from kvstore.store import RowStore
from workers.repair.key_chunks import CHUNK_ROWS
from workers.repair.scan.softmax import Signal

_BOXES_AT_ONCE = 256
"""Pages whose boxes are compared with the queries at once."""


@dataclass(frozen=True, eq=False)
class ReadChunk:
    """Keys of some pages, `[n_layers, n_kv_heads, rows, head_dim]`, and their positions, int64 `[rows]`."""

    pages: Sequence[int]
    positions: Tensor
    keys: Tensor

    def get_layer(self, layer: int) -> Tensor:
        """A layer's keys."""
        return self.keys[layer]


@dataclass(frozen=True, eq=False)
class CodedChunk:
    """Full pages as their summaries know them; `positions` of their tokens, int64 `[rows]`.

    lowest, cell, reach: float32 `[n_layers, n_kv_heads, pages, head_dim]`; high, low: codes, uint8
    `[n_layers, n_kv_heads, rows, ...]`.
    """

    pages: Sequence[int]
    positions: Tensor
    lowest: Tensor
    cell: Tensor
    reach: Tensor
    high: Tensor | None
    low: Tensor | None

    def get_layer(self, layer: int) -> Tensor:
        """The middles of the cells of a layer's keys: float32 `[n_kv_heads, rows, head_dim]`."""
        lowest = self.lowest[layer].unsqueeze(2)
        cell = self.cell[layer].unsqueeze(2)
        high, low = (None if part is None else part[layer] for part in (self.high, self.low))
        codes = unpacked(high, low, lowest.shape[-1])
        heads, rows, head_dim = codes.shape
        return middles_of(codes.view(heads, len(self.pages), -1, head_dim), lowest, cell).view(
            heads, rows, head_dim
        )


Chunk = ReadChunk | CodedChunk


class Pages:
    """The pages of a session's first `length` tokens. Whatever it reads raises what the store raises."""

    def __init__(self, store: RowStore, name: str, length: int, device: torch.device) -> None:
        self._store = store
        self._name = name
        self.length = length
        self._device = device
        self.page_tokens = store.layout.page_tokens
        self.count = -(-length // self.page_tokens)
        self.bytes_read = 0
        self.chunk_pages = max(1, CHUNK_ROWS // self.page_tokens)

    def read(self, pages: Sequence[int]) -> ReadChunk:
        """The keys of pages."""
        found = self._store.read_keys(self._name, pages)
        self.bytes_read += found.bytes_read
        keys = [
            each[:, :, : self._tokens(page)] for page, each in zip(pages, found.keys, strict=True)
        ]
        return ReadChunk(pages, self._positions(pages), torch.cat(keys, dim=2).to(self._device))

    def coded(self, pages: Sequence[int]) -> Iterator[Chunk]:
        """The pages as their summaries know them; those that have none, and an unfinished one, are read."""
        summaries = self.summaries(pages)
        known = [
            (page, summary)
            for page, summary in zip(pages, summaries, strict=True)
            if summary is not None
        ]
        if known:
            yield self._coded([page for page, _ in known], [summary for _, summary in known])
        unknown = [page for page, summary in zip(pages, summaries, strict=True) if summary is None]
        if unknown:
            yield self.read(unknown)

    def summaries(self, pages: Sequence[int]) -> list[PageSummary | None]:
        """The summaries of pages; none for one of which only a part is in the session's first `length` tokens."""
        found = self._store.summaries(self._name, pages)
        full = self.length // self.page_tokens
        return [each if page < full else None for page, each in zip(pages, found, strict=True)]

    def in_chunks(self, pages: Sequence[int]) -> Iterator[Sequence[int]]:
        """Pages, as many at a time as are on the device at once."""
        for first in range(0, len(pages), self.chunk_pages):
            yield pages[first : first + self.chunk_pages]

    def best_first(
        self, signal: Signal, stop_requested: Callable[[], bool]
    ) -> Generator[None, None, list[int]]:
        """All pages: those without a summary, then by how high the attention to one of their keys may be.

        The bound is the box's: no key's logit is over `sum over channels of max(q * lowest, q * highest)`. Quest (Tang
        et al., 2024), section 3.3. Yields between some pages and others; once it is hurried the order is any.
        """
        worth = torch.full((self.count,), torch.inf)
        peaks: list[Tensor] = []
        for _, logits in self._box_logits(signal):
            tops = [each.amax(-1, keepdim=True) for each in logits]
            peaks = (
                [torch.maximum(a, b) for a, b in zip(peaks, tops, strict=True)] if peaks else tops
            )
            yield None
            if stop_requested():
                return list(range(self.count))
        for pages, logits in self._box_logits(signal):
            weights = [each.sub_(peak).exp_() for each, peak in zip(logits, peaks, strict=True)]
            worth[pages] = torch.stack([signal.scores(each, None) for each in weights]).sum(0).cpu()
            yield None
            if stop_requested():
                break
        order: list[int] = worth.sort(descending=True, stable=True).indices.tolist()
        return order

    def _box_logits(self, signal: Signal) -> Iterator[tuple[list[int], list[Tensor]]]:
        """Pages with a summary; per layer the bounds on their logits, `[n_kv_heads, group * t, pages]`."""
        for first in range(0, self.count, _BOXES_AT_ONCE):
            pages = range(first, min(self.count, first + _BOXES_AT_ONCE))
            found = [
                (p, s) for p, s in zip(pages, self.summaries(pages), strict=True) if s is not None
            ]
            if not found:
                continue
            lowest = torch.stack([summary.lowest for _, summary in found], 2).to(self._device)
            highest = torch.stack([summary.highest for _, summary in found], 2).to(self._device)
            centre = (lowest + highest) / 2
            half = (highest - lowest) / 2
            yield (
                [page for page, _ in found],
                [
                    queries @ centre[layer].transpose(1, 2)
                    + queries.abs() @ half[layer].transpose(1, 2)
                    for layer, queries in enumerate(signal.queries)
                ],
            )

    def _coded(self, pages: Sequence[int], summaries: Sequence[PageSummary]) -> CodedChunk:
        def joined(parts: Sequence[Tensor | None]) -> Tensor | None:
            there = [part for part in parts if part is not None]
            return torch.cat(there, dim=2).to(self._device) if there else None

        return CodedChunk(
            pages,
            self._positions(pages),
            torch.stack([s.lowest for s in summaries], 2).to(self._device),
            torch.stack([s.cell for s in summaries], 2).to(self._device),
            torch.stack([s.reach for s in summaries], 2).to(self._device),
            joined([s.high for s in summaries]),
            joined([s.low for s in summaries]),
        )

    def _tokens(self, page: int) -> int:
        return min(self.page_tokens, self.length - page * self.page_tokens)

    def _positions(self, pages: Sequence[int]) -> Tensor:
        places = [torch.arange(self._tokens(page)) + page * self.page_tokens for page in pages]
        return torch.cat(places).to(self._device)
