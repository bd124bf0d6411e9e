"""The softmax of a signal's queries over rows that come chunk by chunk, in any order."""

import torch
from torch import Tensor

from workers.primitives.observation import Observed


class Signal:
    """What rows are scored against, per layer: scaled queries float32 `[n_kv_heads, group * t, head_dim]`."""

    def __init__(self, observed: Observed, n_kv_heads: int, device: torch.device) -> None:
        n_heads, self.tokens, head_dim = observed.queries[0].shape
        self.n_layers = len(observed.queries)
        self.n_heads = n_heads
        self.n_kv_heads = n_kv_heads
        self.queries = [
            (queries.to(device).float() * head_dim**-0.5).reshape(n_kv_heads, -1, head_dim)
            for queries in observed.queries
        ]

    def logits(self, layer: int, keys: Tensor) -> Tensor:
        """Keys `[n_kv_heads, rows, head_dim]` of a layer -> float32 `[n_kv_heads, group * t, rows]`."""
        logits: Tensor = self.queries[layer] @ keys.float().transpose(1, 2)
        return logits

    def scores(self, weights: Tensor, counted: Tensor | None) -> Tensor:
        """A layer's part in the scores of rows: float32 `[rows]`.

        weights: `[n_kv_heads, group * t, rows]`; counted: bool `[n_kv_heads, rows]`, None for all.
        """
        best = self._largest(weights).sum(1)
        if counted is not None:
            best = best * counted
        return best.sum(0) / (self.n_layers * self.n_heads)

    def by_head(self, weights: Tensor) -> Tensor:
        """The same for each KV head on its own, the mean over its group: float32 `[n_kv_heads, rows]`."""
        return self._largest(weights).mean(1)

    def _largest(self, weights: Tensor) -> Tensor:
        heads, _, rows = weights.shape
        return weights.view(heads, -1, self.tokens, rows).amax(2)


class Normaliser:
    """The softmax's normaliser of one layer, for every query: it grows with every chunk of rows.

    peak: float32 `[n_kv_heads, group * t, 1]`, the largest logit so far; total: float64 of the same shape, the sum of
    `exp(logit - peak)`.
    """

    def __init__(self, queries: Tensor) -> None:
        self.peak = torch.full((*queries.shape[:2], 1), -torch.inf, device=queries.device)
        self.total = torch.zeros_like(self.peak, dtype=torch.float64)

    def add(self, logits: Tensor) -> Tensor:
        """Count rows in, `[n_kv_heads, group * t, rows]`; returns `exp(logits - peak)`, made in place of them."""
        peak = torch.maximum(self.peak, logits.amax(-1, keepdim=True))
        self.total *= (self.peak - peak).exp()
        self.peak = peak
        weights = logits.sub_(peak).exp_()
        self.total += weights.sum(-1, keepdim=True)
        return weights

    def weights(self, logits: Tensor) -> Tensor:
        """The attention that rows get: float32 of the shape of `logits`, made in place of them."""
        return logits.sub_(self.peak + self.total.log().float()).exp_()
