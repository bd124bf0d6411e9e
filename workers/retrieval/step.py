"""Retrieval within one forward pass: each layer's rows are extended by those that were found."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvrecall.metrics.page import Metrics
from workers.cache.logits import Logits
from workers.cache.transfers import Transfers
from workers.retrieval.retriever import Found, RetrievalCounts, Retriever


class RetrievalStep:
    """The retrieval of a pass over B sessions, some of which may have none.

    Attributes:
        retrievers: Of each session of the pass; None for one that retrieves nothing.
    """

    def __init__(self, retrievers: Sequence[Retriever | None], transfers: Transfers) -> None:
        """Begin a pass."""
        self.retrievers = tuple(retrievers)
        self._transfers = transfers
        self._before = self._sum()

    @property
    def counts(self) -> RetrievalCounts:
        """What the pass has found so far, of all its sessions."""
        before, now = self._before, self._sum()
        return RetrievalCounts(1, now.rows - before.rows, now.seconds - before.seconds)

    def measure(self, metrics: Metrics) -> None:
        """Count the pass's rows, and observe its seconds."""
        counts = self.counts
        metrics.observe("worker_retrieval_seconds", counts.seconds)
        metrics.inc("worker_retrieved_rows_total", counts.rows)

    def _sum(self) -> RetrievalCounts:
        counts = [each.counts for each in self.retrievers if each is not None]
        return RetrievalCounts(
            rows=sum(each.rows for each in counts), seconds=sum(each.seconds for each in counts)
        )

    def extend(
        self,
        layer: int,
        queries: Tensor,
        rows: tuple[Tensor, Tensor, Tensor],
        mask: Tensor | None,
        logits: Logits,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Extend a layer's rows by those found for its queries: no row that is active already.

        queries: of one token, `[B, n_kv_heads, group, head_dim]`. rows: active keys and values
        `[B, n_kv_heads, n, head_dim]`, and their positions int32 `[B, n_kv_heads, n]`. mask: as
        `ForwardStep.mask`. Returns keys, values and mask of n + r rows, r of the session that has
        most; the others' are masked.
        """
        keys, values, active = rows
        host_queries, host_active = queries.detach().cpu(), active.cpu()
        found = [
            None
            if retriever is None
            else retriever.find(layer, host_queries[index], host_active[index], logits.scale)
            for index, retriever in enumerate(self.retrievers)
        ]
        added = self._transfers.to_device(_pad(found, keys))
        added_keys, added_values, bias = added
        if mask is not None or any(each is None or each.biased for each in found):
            mask = _extend_mask(mask, bias.to(queries.dtype), keys.shape[2])
        return torch.cat([keys, added_keys], 2), torch.cat([values, added_values], 2), mask


def _pad(found: Sequence[Found | None], like: Tensor) -> list[Tensor]:
    """Join the sessions' rows: keys and values `[B, n_kv_heads, r, head_dim]`, and their bias."""
    if len(found) == 1 and found[0] is not None:
        one = found[0]
        return [one.keys[None].to(like.dtype), one.values[None].to(like.dtype), one.bias[None]]
    batch, heads, _, head_dim = like.shape
    width = max(each.positions.shape[1] for each in found if each is not None)
    keys = torch.zeros(batch, heads, width, head_dim, dtype=like.dtype)
    values = torch.zeros_like(keys)
    bias = torch.full((batch, heads, width), -torch.inf)
    for index, each in enumerate(found):
        if each is not None:
            r = each.positions.shape[1]
            keys[index, :, :r] = each.keys
            values[index, :, :r] = each.values
            bias[index, :, :r] = each.bias
    return [keys, values, bias]


def _extend_mask(mask: Tensor | None, bias: Tensor, n: int) -> Tensor:
    """A mask of n + r columns, which is added to logits; bias: `[B, n_kv_heads, r]`."""
    batch, heads, _ = bias.shape
    if mask is None:
        mask = bias.new_zeros(1, 1, 1, n)
    mask = mask.expand(batch, heads, -1, -1)
    return torch.cat([mask, bias[:, :, None].expand(-1, -1, mask.shape[2], -1)], 3)
