"""Softmax of a signal's queries over rows that arrive in chunks, in any order."""

import torch
from torch import Tensor

from workers.primitives.observation import Observed

# Logits in memory at a time: 128 MiB.
_MAX_LOGITS = 1 << 25


class Signal:
    """The queries that rows are scored against.

    Memory: the queries as they were observed, and one layer of them in float32. A long signal is
    compared with fewer rows at a time (`rows_at_once`).

    Attributes:
        tokens: Number of the signal's tokens, t.
        n_layers: Number of layers.
        n_heads: Number of query heads.
        n_kv_heads: Number of KV heads.
    """

    def __init__(self, observed: Observed, n_kv_heads: int, device: torch.device) -> None:
        """Take the observed queries; they are scaled and grouped by KV head where they are used."""
        self.n_heads, self.tokens, self._head_dim = observed.queries[0].shape
        self.n_layers = len(observed.queries)
        self.n_kv_heads = n_kv_heads
        self._observed = [queries.to(device) for queries in observed.queries]

    def queries(self, layer: int) -> Tensor:
        """Scaled queries of a layer, float32 `[n_kv_heads, group * t, head_dim]`."""
        scaled: Tensor = self._observed[layer].float() * self._head_dim**-0.5
        return scaled.reshape(self.n_kv_heads, -1, self._head_dim)

    def rows_at_once(self, most: int, *, layers: int = 1) -> int:
        """Rows, at most `most`, whose logits in `layers` layers fit into 128 MiB; at least 1."""
        return max(1, min(most, _MAX_LOGITS // (layers * self.n_heads * self.tokens)))

    def logits(self, layer: int, keys: Tensor) -> Tensor:
        """Logits of a layer's keys `[n_kv_heads, rows, head_dim]`.

        Returns float32 `[n_kv_heads, group * t, rows]`.
        """
        logits: Tensor = self.queries(layer) @ keys.float().transpose(1, 2)
        return logits

    def scores(self, weights: Tensor, counted: Tensor | None) -> Tensor:
        """A layer's contribution to the scores of rows: float32 `[rows]`.

        weights: `[n_kv_heads, group * t, rows]`; counted: bool `[n_kv_heads, rows]`, None for all.
        """
        best = self._max_over_tokens(weights).sum(1)
        if counted is not None:
            best = best * counted
        return best.sum(0) / (self.n_layers * self.n_heads)

    def head_scores(self, weights: Tensor) -> Tensor:
        """Scores of rows per KV head, mean over its group: float32 `[n_kv_heads, rows]`.

        weights: `[n_kv_heads, group * t, rows]`.
        """
        return self._max_over_tokens(weights).mean(1)

    def _max_over_tokens(self, weights: Tensor) -> Tensor:
        heads, _, rows = weights.shape
        return weights.view(heads, -1, self.tokens, rows).amax(2)


class Normaliser:
    """Running softmax normaliser of one layer, for every query (online softmax).

    Attributes:
        peak: Largest logit so far, float32 `[n_kv_heads, group * t, 1]`.
        total: Sum of `exp(logit - peak)`, float64 of the same shape.
    """

    def __init__(self, queries: Tensor) -> None:
        """Start without rows; queries: float32 `[n_kv_heads, group * t, head_dim]`."""
        self.peak = torch.full((*queries.shape[:2], 1), -torch.inf, device=queries.device)
        self.total = torch.zeros_like(self.peak, dtype=torch.float64)

    def add(self, logits: Tensor) -> Tensor:
        """Add rows, `[n_kv_heads, group * t, rows]`; returns `exp(logits - peak)`, in place."""
        peak = torch.maximum(self.peak, logits.amax(-1, keepdim=True))
        self.total *= (self.peak - peak).exp()
        self.peak = peak
        weights = logits.sub_(peak).exp_()
        self.total += weights.sum(-1, keepdim=True)
        return weights

    def weights(self, logits: Tensor) -> Tensor:
        """Compute attention weights, float32 of the shape of `logits`, in place."""
        return logits.sub_(self.peak + self.total.log().float()).exp_()
