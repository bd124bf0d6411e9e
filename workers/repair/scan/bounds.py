"""Bounds on scores from the summaries of pages, tightened by reading some of the pages."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.repair.scan.pages import Chunk, CodedChunk, ReadChunk
from workers.repair.scan.softmax import Signal

# Rounding of a logit in float32, relative to `sum over channels of |q| * |k|`, in any summation
# order.
_ROUNDING = 2.0**-22

# Relative rounding of sums and exponentials in float32.
_SUMMING = 2.0**-16

_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, eq=False)
class Logits:
    """A layer's logits of a chunk's rows, in parts of equally many rows with a common error.

    Attributes:
        values: float32 `[n_kv_heads, group * t, parts, rows of a part]`.
        error: Largest distance of a value from the true logit, `[n_kv_heads, group * t, parts]`.
        rounding: Largest distance of a value from itself, computed again; of the same shape.
    """

    values: Tensor
    error: Tensor
    rounding: Tensor


def compute_logits(signal: Signal, layer: int, chunk: Chunk) -> Logits:
    """Compute the logits of a chunk's rows: one part if it was read, else one part a page."""
    keys = chunk.get_layer(layer)
    queries = signal.queries(layer).abs()
    if isinstance(chunk, CodedChunk):
        lowest = chunk.lowest[layer]
        largest = keys.view(*lowest.shape[:2], -1, lowest.shape[-1]).abs().amax(2)
        largest = torch.maximum(largest + chunk.bin_width[layer], lowest.abs())
        rounding = queries @ largest.transpose(1, 2) * _ROUNDING
        error = queries @ chunk.max_error[layer].transpose(1, 2) + rounding
    else:
        largest = keys.float().abs().amax(1, keepdim=True)
        error = rounding = queries @ largest.transpose(1, 2) * _ROUNDING
    return Logits(signal.logits(layer, keys).view(*error.shape, -1), error, rounding)


class BoundedNormaliser:
    """Bounds on the softmax normaliser of one layer, for every query.

    Attributes:
        peak: Largest logit so far, float32 `[n_kv_heads, group * t, 1]`.
        low: Lower bound on the sum over all rows of `exp(logit - peak)`, float64 of the same shape.
        high: Upper bound, as `low`.
    """

    def __init__(self, queries: Tensor) -> None:
        """Start without rows; queries: float32 `[n_kv_heads, group * t, head_dim]`."""
        self.peak = torch.full((*queries.shape[:2], 1), -torch.inf, device=queries.device)
        self.low = torch.zeros_like(self.peak, dtype=torch.float64)
        self.high = torch.zeros_like(self.low)

    def add(self, logits: Logits) -> Tensor:
        """Add rows; returns `exp(logits - peak)`, `[n_kv_heads, group * t, rows]`."""
        peak = torch.maximum(self.peak, logits.values.amax((2, 3)).unsqueeze(-1))
        scale = (self.peak - peak).double().exp()
        self.low = self.low * scale
        self.high = self.high * scale
        self.peak = peak
        weights = (logits.values - peak.unsqueeze(-1)).exp_()
        self._add_weights(weights, logits)
        return weights.flatten(2)

    def replace(self, approximate: Logits, read: Logits) -> None:
        """Replace rows that were added from their summaries by the rows as they were read."""
        sums = self._sum((approximate.values - self.peak.unsqueeze(-1)).exp_())
        # Subtract at most what was added to `high`, and at least what was added to `low`.
        error = (approximate.error - 2 * approximate.rounding).double()
        self.low -= ((-error).exp() * sums).sum(-1, keepdim=True) * (1 + _SUMMING)
        self.high -= (error.exp() * sums).sum(-1, keepdim=True) * (1 - _SUMMING)
        self._add_weights((read.values - self.peak.unsqueeze(-1)).exp_(), read)

    def log_midpoint(self) -> Tensor:
        """Geometric mean of the bounds, as a logarithm: float32 `[n_kv_heads, group * t, 1]`."""
        return self.peak + (self.low.log() + self.high.log()).div_(2).float()

    def log_error(self) -> Tensor:
        """Distance of the bounds from `log_midpoint`, float32 `[n_kv_heads, group * t, 1]`."""
        return (self.high.log() - self.low.log()).div_(2).float()

    def is_finite(self) -> bool:
        """True if the bounds are positive and finite, so that they bound anything."""
        return bool((self.low > 0).all()) and bool(self.high.isfinite().all())

    def _add_weights(self, weights: Tensor, logits: Logits) -> None:
        sums = self._sum(weights)
        error = logits.error.double()
        self.low += ((-error).exp() * sums).sum(-1, keepdim=True)
        # A weight that underflows float32 may be large in truth where the error is.
        self.high += (error.exp() * (sums + weights.shape[-1] * _TINY)).sum(-1, keepdim=True)

    @staticmethod
    def _sum(weights: Tensor) -> Tensor:
        return weights.sum(-1).double()


def layer_bounds(
    signal: Signal, normaliser: BoundedNormaliser, logits: Logits, counted: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Lower and upper bounds on a layer's contribution to the groups' attention.

    float32 `[groups, rows]` each.
    """
    weights = (logits.values - normaliser.log_midpoint().unsqueeze(-1)).exp_()
    factor = (logits.error + normaliser.log_error()).exp_().unsqueeze(-1)
    lower = (weights / factor).flatten(2)
    upper = weights.add_(_TINY).mul_(factor).clamp_(max=1).flatten(2)
    low = signal.attention(lower, counted) * (1 - _SUMMING)
    high = signal.attention(upper, counted) * (1 + _SUMMING)
    return low, high


def query_weights(signal: Signal, normaliser: BoundedNormaliser, logits: Logits) -> Tensor:
    """Influence of each query's normaliser on these rows' scores, see `Signal.query_influence`."""
    weights = (logits.values - normaliser.log_midpoint().unsqueeze(-1)).exp_().flatten(2)
    return signal.query_influence(weights)


def bound_gap(normaliser: BoundedNormaliser, logits: Logits, query_weights: Tensor) -> Tensor:
    """Each part's contribution to the gap between the normalisers' bounds: float32 `[parts]`.

    query_weights: see `query_weights`.
    """
    shares = (logits.values - normaliser.log_midpoint().unsqueeze(-1)).exp_().sum(-1)
    return (shares * (2 * logits.error.sinh()) * query_weights).sum((0, 1))


def concatenate(chunks: Sequence[ReadChunk], tokens: Tensor) -> ReadChunk:
    """Concatenate the rows of chunks that belong to `tokens`, bool `[length]`."""
    selected = [(chunk, tokens[chunk.positions]) for chunk in chunks]
    return ReadChunk(
        (),
        torch.cat([chunk.positions[mask] for chunk, mask in selected]),
        torch.cat([chunk.keys[:, :, mask] for chunk, mask in selected], dim=2),
    )
