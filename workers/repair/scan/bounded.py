"""The scan that reads only pages that the selection depends on.

Summaries bound every score. Pages of tokens whose selection is ambiguous are read, then those that
contribute most to the gap between the softmax normalisers' bounds, until nothing is ambiguous.
"""

from collections.abc import Callable, Generator, Sequence

import torch
from torch import Tensor

from workers.repair.scan.base import FindAmbiguous, Scan, ScanResult
from workers.repair.scan.bounds import (
    BoundedNormaliser,
    bound_gap,
    compute_logits,
    concatenate,
    layer_bounds,
    query_weights,
)
from workers.repair.scan.pages import Chunk, ReadChunk

# Ambiguous tokens whose keys are held while others are read.
_MAX_HELD_TOKENS = 4096


def bounded(
    scan: Scan,
    find_ambiguous: FindAmbiguous,
    exact: Callable[[], Generator[None, None, ScanResult]],
) -> Generator[None, None, ScanResult]:
    """Compute scores that lead to the same selection as those of `exact`.

    `exact` takes over where bounds do not decide: for scores that are equal except for rounding.
    Otherwise every page is read at most once, where `exact` reads every page twice.
    """
    state = _BoundedScan(scan, find_ambiguous)
    if not (yield from state.normalise()) or not (yield from state.bound()):
        return scan.to_result(state.estimates(), state.scored, False)
    if not state.is_finite():
        return (yield from exact())
    if (yield from state.converge()):
        return scan.to_result(state.midpoints(), state.scored, True)
    if not scan.stop_requested():
        result = yield from exact()
        if result.complete:
            return result
    return scan.to_result(state.midpoints(), state.scored, False)


class _BoundedScan:
    """Bounds on the attention of the signal's groups, and the pages and keys read for them.

    Attributes:
        scored: Tokens that have an estimate, bool `[length]`.
    """

    def __init__(self, scan: Scan, find_ambiguous: FindAmbiguous) -> None:
        self._scan = scan
        self._find_ambiguous = find_ambiguous
        signal = scan.signal
        self._normalisers = [
            BoundedNormaliser(signal.queries(layer)) for layer in range(signal.n_layers)
        ]
        self._max_held = signal.rows_at_once(_MAX_HELD_TOKENS)
        self.scored = scan.no_tokens()
        # Before there are bounds.
        self._estimates = scan.no_attention()
        self._lower = scan.no_attention()
        self._upper = scan.no_attention()
        # Pages whose rows are in the normalisers as they were read.
        self._read = torch.zeros(scan.pages.count, dtype=torch.bool)
        self._pages_left = scan.pages.count
        self._pages_at_once = max(1, min(scan.pages.chunk_pages, scan.pages.count // 64))
        self._held: list[ReadChunk] = []
        self._is_held = scan.no_tokens()

    def estimates(self) -> Tensor:
        """Scores before there are bounds, float32 `[length]`."""
        return self._scan.signal.contrast(self._estimates)

    def midpoints(self) -> Tensor:
        """Midpoints between the bounds on the scores, float32 `[length]`."""
        lower, upper = self._score_bounds()
        return (lower + upper) / 2

    def normalise(self) -> Generator[None, None, bool]:
        """Bound the normalisers by every page's summary, best pages first; False if stopped."""
        scan = self._scan
        order = yield from scan.pages.best_first(scan.stop_requested)
        for pages in scan.pages.in_chunks(order):
            if scan.stop_requested():
                return False
            for chunk in scan.pages.approximate(pages):
                for layer, normaliser in enumerate(self._normalisers):
                    weights = normaliser.add(compute_logits(scan.signal, layer, chunk))
                    weights *= (normaliser.low * normaliser.high).rsqrt().float()
                    counted = scan.get_counted(layer, chunk)
                    self._estimates[:, chunk.positions] += scan.signal.attention(weights, counted)
                self.scored[chunk.positions] = True
                self._read[list(chunk.pages)] = isinstance(chunk, ReadChunk)
            yield None
        return True

    def bound(self) -> Generator[None, None, bool]:
        """Bound the attention to every token by the normalisers' bounds; False if stopped."""
        scan = self._scan
        for pages in scan.pages.in_chunks(range(scan.pages.count)):
            if scan.stop_requested():
                return False
            for chunk in scan.pages.approximate(pages):
                lower, upper = self._bounds(chunk)
                self._lower[:, chunk.positions] = lower
                self._upper[:, chunk.positions] = upper
            yield None
        return True

    def is_finite(self) -> bool:
        """False if the summaries bound nothing: very large keys may be too far from their codes."""
        return all(normaliser.is_finite() for normaliser in self._normalisers)

    def converge(self) -> Generator[None, None, bool]:
        """Read pages until no token is ambiguous.

        Returns False if a stop was requested, or if reading more does not help.
        """
        gaps: Tensor | None = None
        while not self._scan.stop_requested():
            ambiguous = self._ambiguous()
            if not bool(ambiguous.any()):
                return True
            unread = ambiguous & ~self._is_held
            if bool(unread.any()):
                gaps = None
                pages = self._pages_by_upper_bound(unread)
                if len(pages) > self._pages_left or int(ambiguous.sum()) > self._max_held:
                    return False
            else:
                if gaps is None:
                    gaps = yield from self._page_gaps(ambiguous)
                gaps[self._read] = 0
                pages = _pages_by_gap(gaps)
            if not pages or self._pages_left <= 0:
                return False
            self._read_pages(pages[: self._pages_at_once], ambiguous)
            yield None
        return False

    def _ambiguous(self) -> Tensor:
        lower, upper = self._score_bounds()
        return self._find_ambiguous(lower.cpu(), upper.cpu()).to(lower.device)

    def _score_bounds(self) -> tuple[Tensor, Tensor]:
        """Lower and upper bounds on the scores, float32 `[length]` each."""
        return self._scan.signal.contrast_bounds(self._lower, self._upper)

    def _bounds(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Bounds on the attention to a chunk's rows, float32 `[groups, rows]` each."""
        scan = self._scan
        lower = torch.zeros(scan.signal.groups, len(chunk.positions), device=scan.device)
        upper = torch.zeros_like(lower)
        for layer, normaliser in enumerate(self._normalisers):
            logits = compute_logits(scan.signal, layer, chunk)
            counted = scan.get_counted(layer, chunk)
            low, high = layer_bounds(scan.signal, normaliser, logits, counted)
            lower += low
            upper += high
        return lower, upper

    def _pages_by_upper_bound(self, tokens: Tensor) -> list[int]:
        """The pages of tokens, bool `[length]`, in the order of the tokens' upper bounds."""
        positions = tokens.nonzero().flatten()
        order = self._score_bounds()[1][positions].argsort(descending=True, stable=True)
        pages = positions[order] // self._scan.pages.page_tokens
        return list(dict.fromkeys(pages.tolist()))

    def _read_pages(self, pages: Sequence[int], ambiguous: Tensor) -> None:
        """Read pages, hold the keys of their ambiguous tokens, and tighten the bounds of these."""
        scan = self._scan
        self._pages_left -= len(pages)
        again = [page for page in pages if self._read[page]]
        chunks = [scan.pages.read(again)] if again else []
        new = [page for page in pages if not self._read[page]]
        chunks += [self._replace(chunk) for chunk in scan.pages.approximate(new)] if new else []
        self._read[list(pages)] = True
        self._hold(chunks, ambiguous)
        if bool((ambiguous & self._is_held).any()):
            self._tighten(concatenate(self._held, ambiguous))

    def _replace(self, chunk: Chunk) -> ReadChunk:
        """Read a chunk's pages, and replace their rows in the normalisers."""
        if isinstance(chunk, ReadChunk):
            # The summary was dropped meanwhile; bounds that were computed with it still hold.
            return chunk
        scan = self._scan
        read = scan.pages.read(chunk.pages)
        for layer, normaliser in enumerate(self._normalisers):
            normaliser.replace(
                compute_logits(scan.signal, layer, chunk), compute_logits(scan.signal, layer, read)
            )
        return read

    def _hold(self, chunks: Sequence[ReadChunk], ambiguous: Tensor) -> None:
        new = concatenate(chunks, ambiguous & ~self._is_held)
        if len(new.positions):
            self._held.append(new)
            self._is_held[new.positions] = True

    def _tighten(self, chunk: ReadChunk) -> None:
        lower, upper = self._bounds(chunk)
        at = chunk.positions
        upper = torch.minimum(self._upper[:, at], upper)
        self._upper[:, at] = upper
        self._lower[:, at] = torch.minimum(torch.maximum(self._lower[:, at], lower), upper)

    def _page_gaps(self, ambiguous: Tensor) -> Generator[None, None, Tensor]:
        """Contribution of each unread page to the gap of the normalisers' bounds.

        Normalisers count as the ambiguous tokens depend on them. Returns float32 `[pages]`.
        """
        scan = self._scan
        held = concatenate(self._held, ambiguous)
        weights = [
            query_weights(scan.signal, normaliser, compute_logits(scan.signal, layer, held))
            for layer, normaliser in enumerate(self._normalisers)
        ]
        gaps = torch.zeros(scan.pages.count)
        for pages in scan.pages.in_chunks((~self._read).nonzero().flatten().tolist()):
            for chunk in scan.pages.approximate(pages):
                layer_gaps = [
                    bound_gap(normaliser, compute_logits(scan.signal, layer, chunk), weights[layer])
                    for layer, normaliser in enumerate(self._normalisers)
                ]
                if not isinstance(chunk, ReadChunk):
                    gaps[list(chunk.pages)] = torch.stack(layer_gaps).sum(0).cpu()
            yield None
        return gaps


def _pages_by_gap(gaps: Tensor) -> list[int]:
    """Pages with a gap, float32 `[pages]`, the largest first."""
    order = gaps.argsort(descending=True, stable=True).tolist()
    return [page for page in order if gaps[page] > 0]
