"""The scan that reads only pages on which the choice depends.

Summaries bound every score. Pages of tokens whose scores are in doubt are read, then those that the softmax's
normalisers are most unsure of, until no doubt is left.
"""

from collections.abc import Callable, Generator, Sequence

import torch
from torch import Tensor

from workers.repair.scan.base import AmbiguousTokens, Scan, ScanResult
from workers.repair.scan.bounds import (
    BoundedNormaliser,
    bounds_of_layer,
    joined,
    logits_of,
    slack,
    weighty,
)
from workers.repair.scan.pages import Chunk, ReadChunk

_MOST_HELD = 4096
"""Tokens in doubt whose keys are held while others are read."""


def bounded(
    over: Scan,
    find_ambiguous: AmbiguousTokens,
    exact: Callable[[], Generator[None, None, ScanResult]],
) -> Generator[None, None, ScanResult]:
    """Scores that lead to the same choice as those of `exact`, which takes over where bounds cannot settle it.

    That is when scores are equal but for rounding. All else is settled by reading every page once at the most, and
    `exact` reads every page twice.
    """
    scan = _Bounded(over, find_ambiguous)
    if not (yield from scan.normalise()) or not (yield from scan.bound()):
        return over.to_result(scan.scores, scan.scored, False)
    if not scan.sound():
        return (yield from exact())
    if (yield from scan.settle()):
        return over.to_result(scan.middles(), scan.scored, True)
    if not over.stop_requested():
        found = yield from exact()
        if found.complete:
            return found
    return over.to_result(scan.middles(), scan.scored, False)


class _Bounded:
    """What is known of the scores: `scores` are the best guess before `lower` and `upper`, float32 `[length]`."""

    def __init__(self, over: Scan, find_ambiguous: AmbiguousTokens) -> None:
        self._over = over
        self._find_ambiguous = find_ambiguous
        self._normalisers = [BoundedNormaliser(queries) for queries in over.signal.queries]
        self.scores = over.zeros()
        self.scored = over.zeros().bool()
        self._lower = over.zeros()
        self._upper = over.zeros()
        self._read = torch.zeros(over.pages.count, dtype=torch.bool)
        """Pages whose rows are in the normalisers as they were read."""
        self._may_read = over.pages.count
        self._at_once = max(1, min(over.pages.chunk_pages, over.pages.count // 64))
        self._held: list[ReadChunk] = []
        self._is_held = over.zeros().bool()

    def middles(self) -> Tensor:
        """Scores between the bounds."""
        return (self._lower + self._upper) / 2

    def normalise(self) -> Generator[None, None, bool]:
        """Bound the normalisers with every page's summary, best first; whether it came to the end."""
        over = self._over
        order = yield from over.pages.best_first(over.signal, over.stop_requested)
        for pages in over.pages.in_chunks(order):
            if over.stop_requested():
                return False
            for chunk in over.pages.coded(pages):
                for layer, normaliser in enumerate(self._normalisers):
                    weights = normaliser.add(logits_of(over.signal, layer, chunk))
                    weights /= (normaliser.low * normaliser.high).sqrt()
                    self.scores[chunk.positions] += over.signal.scores(
                        weights, over.counts(layer, chunk)
                    )
                self.scored[chunk.positions] = True
                self._read[list(chunk.pages)] = isinstance(chunk, ReadChunk)
            yield None
        return True

    def bound(self) -> Generator[None, None, bool]:
        """Bound every token's score with the normalisers' bounds; whether it came to the end."""
        over = self._over
        for pages in over.pages.in_chunks(range(over.pages.count)):
            if over.stop_requested():
                return False
            for chunk in over.pages.coded(pages):
                self._lower[chunk.positions], self._upper[chunk.positions] = self._bounds(chunk)
            yield None
        return True

    def sound(self) -> bool:
        """Whether the summaries bound anything at all; keys of absurd sizes may be too far from their codes."""
        return all(normaliser.sound() for normaliser in self._normalisers)

    def settle(self) -> Generator[None, None, bool]:
        """Read until there is no doubt; False when it was hurried, or reading does not help."""
        unsure: Tensor | None = None
        while not self._over.stop_requested():
            doubtful = self._doubtful(self._lower, self._upper)
            if not bool(doubtful.any()):
                return True
            unheld = doubtful & ~self._is_held
            if bool(unheld.any()):
                unsure = None
                pages = self._pages_of(unheld)
                if len(pages) > self._may_read or int(doubtful.sum()) > _MOST_HELD:
                    return False
            else:
                if unsure is None:
                    unsure = yield from self._unsure(doubtful)
                unsure[self._read] = 0
                pages = self._unread(unsure)
            if not pages or self._may_read <= 0:
                return False
            self._read_more(pages[: self._at_once], doubtful)
            yield None
        return False

    def _doubtful(self, lower: Tensor, upper: Tensor) -> Tensor:
        return self._find_ambiguous(lower.cpu(), upper.cpu()).to(lower.device)

    def _bounds(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Bounds on the scores of a chunk's rows, float32 `[rows]` each."""
        over = self._over
        lower = torch.zeros(len(chunk.positions), device=over.device)
        upper = torch.zeros_like(lower)
        for layer, normaliser in enumerate(self._normalisers):
            logits = logits_of(over.signal, layer, chunk)
            low, high = bounds_of_layer(over.signal, normaliser, logits, over.counts(layer, chunk))
            lower += low
            upper += high
        return lower, upper

    def _pages_of(self, tokens: Tensor) -> list[int]:
        """The pages of some tokens, bool `[length]`, first that of the token which may have the highest score."""
        places = tokens.nonzero().flatten()
        order = self._upper[places].argsort(descending=True, stable=True)
        return list(dict.fromkeys((places[order] // self._over.pages.page_tokens).tolist()))

    def _read_more(self, pages: Sequence[int], doubtful: Tensor) -> None:
        """Read pages, hold the keys of their doubtful tokens, and bound these anew."""
        over = self._over
        self._may_read -= len(pages)
        parts = (
            [over.pages.read(again)]
            if (again := [page for page in pages if self._read[page]])
            else []
        )
        fresh = [page for page in pages if not self._read[page]]
        for known in over.pages.coded(fresh) if fresh else ():
            if isinstance(known, ReadChunk):  # its summary is gone; the bounds with it stay true
                parts.append(known)
                continue
            parts.append(read := over.pages.read(known.pages))
            for layer, normaliser in enumerate(self._normalisers):
                normaliser.replace(
                    logits_of(over.signal, layer, known), logits_of(over.signal, layer, read)
                )
        self._read[list(pages)] = True
        self._hold(parts, doubtful)
        if bool((doubtful & self._is_held).any()):
            self._narrow(joined(self._held, doubtful))

    def _hold(self, parts: Sequence[ReadChunk], doubtful: Tensor) -> None:
        new = joined(parts, doubtful & ~self._is_held)
        if len(new.positions):
            self._held.append(new)
            self._is_held[new.positions] = True

    def _narrow(self, chunk: ReadChunk) -> None:
        lower, upper = self._bounds(chunk)
        at = chunk.positions
        self._upper[at] = torch.minimum(self._upper[at], upper)
        self._lower[at] = torch.minimum(torch.maximum(self._lower[at], lower), self._upper[at])

    def _unsure(self, doubtful: Tensor) -> Generator[None, None, Tensor]:
        """How unsure each unread page makes the normalisers that the doubtful tokens hang on: float32 `[pages]`."""
        over = self._over
        held = joined(self._held, doubtful)
        matters = [
            weighty(over.signal, normaliser, logits_of(over.signal, layer, held))
            for layer, normaliser in enumerate(self._normalisers)
        ]
        unsure = torch.zeros(over.pages.count)
        for pages in over.pages.in_chunks((~self._read).nonzero().flatten().tolist()):
            for chunk in over.pages.coded(pages):
                of_layers = [
                    slack(normaliser, logits_of(over.signal, layer, chunk), matters[layer])
                    for layer, normaliser in enumerate(self._normalisers)
                ]
                if not isinstance(chunk, ReadChunk):
                    unsure[list(chunk.pages)] = torch.stack(of_layers).sum(0).cpu()
            yield None
        return unsure

    def _unread(self, unsure: Tensor) -> list[int]:
        """Pages that would make the normalisers surer, those first that would most."""
        return [
            page
            for page in unsure.argsort(descending=True, stable=True).tolist()
            if unsure[page] > 0
        ]
