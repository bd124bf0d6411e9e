"""Bounds on scores from the summaries of pages, which reading some of the pages makes narrower."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.repair.scan.pages import Chunk, CodedChunk, ReadChunk
from workers.repair.scan.softmax import Signal

_ROUNDING = 2.0**-22
"""Of a logit in float32, relative to `sum over channels of |q| * |k|`, however the product is divided up."""
_SUMMING = 2.0**-16
"""Of sums and exponentials in float32, relative."""
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, eq=False)
class Logits:
    """A layer's logits of a chunk's rows, which lie in parts of equally many rows, each with its own error.

    values: float32 `[n_kv_heads, group * t, parts, rows of a part]`; error, rounding: `[n_kv_heads, group * t, parts]`:
    how far at most a value is from the true logit, and from itself when it is computed again.
    """

    values: Tensor
    error: Tensor
    rounding: Tensor


def logits_of(signal: Signal, layer: int, chunk: Chunk) -> Logits:
    """The logits of rows that were read, one part, or of codes, each page a part."""
    keys = chunk.get_layer(layer)
    queries = signal.queries[layer].abs()
    if isinstance(chunk, CodedChunk):
        lowest = chunk.lowest[layer]
        cell = chunk.cell[layer]
        reach = chunk.reach[layer]
        largest = keys.view(*lowest.shape[:2], -1, lowest.shape[-1]).abs().amax(2)
        largest = torch.maximum(largest + cell, lowest.abs())
        rounding = queries @ largest.transpose(1, 2) * _ROUNDING
        error = queries @ reach.transpose(1, 2) + rounding
    else:
        largest = keys.float().abs().amax(1, keepdim=True)
        error = rounding = queries @ largest.transpose(1, 2) * _ROUNDING
    return Logits(signal.logits(layer, keys).view(*error.shape, -1), error, rounding)


class BoundedNormaliser:
    """The softmax's normaliser of one layer between two bounds, for every query.

    peak: float32 `[n_kv_heads, group * t, 1]`; low, high: float64 of the same shape, bounds on the sum over all rows of
    `exp(logit - peak)`.
    """

    def __init__(self, queries: Tensor) -> None:
        self.peak = torch.full((*queries.shape[:2], 1), -torch.inf, device=queries.device)
        self.low = torch.zeros_like(self.peak, dtype=torch.float64)
        self.high = torch.zeros_like(self.low)

    def add(self, logits: Logits) -> Tensor:
        """Count rows in; returns `exp(logits - peak)`, `[n_kv_heads, group * t, rows]`."""
        peak = torch.maximum(self.peak, logits.values.amax((2, 3)).unsqueeze(-1))
        scale = (self.peak - peak).double().exp()
        self.low = self.low * scale
        self.high = self.high * scale
        self.peak = peak
        weights = (logits.values - peak.unsqueeze(-1)).exp_()
        self._count(weights, logits)
        return weights.flatten(2)

    def replace(self, known: Logits, read: Logits) -> None:
        """Count rows as they were read instead of as their summaries know them."""
        sums = self._sums((known.values - self.peak.unsqueeze(-1)).exp_())
        # Not a bit more than was added must go from above, not a bit less from below.
        error = (known.error - 2 * known.rounding).double()
        self.low -= ((-error).exp() * sums).sum(-1, keepdim=True) * (1 + _SUMMING)
        self.high -= (error.exp() * sums).sum(-1, keepdim=True) * (1 - _SUMMING)
        self._count((read.values - self.peak.unsqueeze(-1)).exp_(), read)

    def middle(self) -> Tensor:
        """Between the bounds, by their logarithms; with the peak, float32 `[n_kv_heads, group * t, 1]`."""
        return self.peak + (self.low.log() + self.high.log()).div_(2).float()

    def spread(self) -> Tensor:
        """How far the bounds are from `middle` at most, as a logarithm, float32 `[n_kv_heads, group * t, 1]`."""
        return (self.high.log() - self.low.log()).div_(2).float()

    def sound(self) -> bool:
        """Whether the bounds say anything."""
        return bool((self.low > 0).all()) and bool(self.high.isfinite().all())

    def _count(self, weights: Tensor, logits: Logits) -> None:
        sums = self._sums(weights)
        error = logits.error.double()
        self.low += ((-error).exp() * sums).sum(-1, keepdim=True)
        # What is too small for float32 may be large in truth where the error is.
        self.high += (error.exp() * (sums + weights.shape[-1] * _TINY)).sum(-1, keepdim=True)

    @staticmethod
    def _sums(weights: Tensor) -> Tensor:
        return weights.sum(-1).double()


def bounds_of_layer(
    signal: Signal, normaliser: BoundedNormaliser, logits: Logits, counted: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Lower and upper bounds on a layer's part in the scores of rows: float32 `[rows]` each."""
    weights = (logits.values - normaliser.middle().unsqueeze(-1)).exp_()
    factor = (logits.error + normaliser.spread()).exp_().unsqueeze(-1)
    lower = (weights / factor).flatten(2)
    upper = weights.add_(_TINY).mul_(factor).clamp_(max=1).flatten(2)
    return signal.scores(lower, counted) * (1 - _SUMMING), signal.scores(upper, counted) * (
        1 + _SUMMING
    )


def weighty(signal: Signal, normaliser: BoundedNormaliser, logits: Logits) -> Tensor:
    """How much an error of each query's normaliser, in parts of it, changes a score of these rows at most.

    float32 `[n_kv_heads, group * t, 1]`: a query matters where it is the one of its head that attends most to a row.
    """
    weights = (logits.values - normaliser.middle().unsqueeze(-1)).exp_().flatten(2)
    heads, _, rows = weights.shape
    of_heads = weights.view(heads, -1, signal.tokens, rows)
    largest = of_heads * (of_heads == of_heads.amax(2, keepdim=True))
    return largest.amax(-1).view(heads, -1, 1)


def slack(normaliser: BoundedNormaliser, logits: Logits, matters: Tensor) -> Tensor:
    """How much of the normalisers' uncertainty comes from each part, weighed by `matters`: float32 `[parts]`."""
    shares = (logits.values - normaliser.middle().unsqueeze(-1)).exp_().sum(-1)
    return (shares * (2 * logits.error.sinh()) * matters).sum((0, 1))


def joined(read: Sequence[ReadChunk], tokens: Tensor) -> ReadChunk:
    """Of chunks that were read only some tokens, bool `[length]`."""
    kept = [(chunk, tokens[chunk.positions]) for chunk in read]
    return ReadChunk(
        (),
        torch.cat([chunk.positions[inside] for chunk, inside in kept]),
        torch.cat([chunk.keys[:, :, inside] for chunk, inside in kept], dim=2),
    )
