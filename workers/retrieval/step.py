"""Retrieval within one forward pass: attention to active rows and to those that are found."""

import time
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from kvrecall.metrics.page import Metrics
from workers.cache.logits import Logits, attend
from workers.cache.transfers import Transfers
from workers.native.attention import NativeAttention
from workers.native.searched_rows import SearchedRows
from workers.positions.seen_rows import SeenRows
from workers.retrieval.retriever import LAYER_STEP, Found, RetrievalCounts, Retriever


class RetrievalStep:
    """The retrieval of a pass over B sessions, some of which may have none.

    Attributes:
        retrievers: Of each session of the pass; None for one that retrieves nothing.
    """

    def __init__(
        self,
        retrievers: Sequence[Retriever | None],
        transfers: Transfers,
        native: NativeAttention | None = None,
        seen: Sequence[SeenRows | None] | None = None,
    ) -> None:
        """Begin a pass; native: computes the layers that it takes, torch the others, with the same draws.

        seen: how each session sees its rows, if one of them is behind the model's window.
        """
        self.retrievers = tuple(retrievers)
        self._transfers = transfers
        self._native = native
        self._seen = [None] * len(self.retrievers) if seen is None else list(seen)
        self._before = self._sum()

    @property
    def counts(self) -> RetrievalCounts:
        """What the pass has found so far, of all its sessions."""
        before, now = self._before, self._sum()
        return RetrievalCounts(1, now.rows - before.rows, now.seconds - before.seconds)

    def measure(self, metrics: Metrics) -> None:
        """Observe the pass's seconds."""
        metrics.observe("worker_retrieval_seconds", self.counts.seconds)

    def _sum(self) -> RetrievalCounts:
        counts = [each.counted for each in self.retrievers if each is not None]
        return RetrievalCounts(
            rows=sum(each.rows for each in counts), seconds=sum(each.seconds for each in counts)
        )

    def attend(
        self,
        layer: int,
        queries: Tensor,
        rows: tuple[Tensor, Tensor, Tensor],
        mask: Tensor | None,
        logits: Logits,
    ) -> Tensor:
        """Attend to a layer's active rows and those found for its queries: none that is active already.

        queries: of one token, `[B, n_kv_heads, group, head_dim]`. rows: active keys and values
        `[B, n_kv_heads, n, head_dim]`, and their positions int32 `[B, n_kv_heads, n]`. mask: as
        `ForwardStep.mask`. Returns the shape of `queries`.
        """
        native, searched = self._native, self._search_rows(layer)
        if (
            native is None
            or searched is None
            or not logits.plain
            or not native.takes(queries, rows, mask, searched)
        ):
            keys, values, mask = self.extend(layer, queries, rows, mask, logits)
            return attend(queries, keys, values, mask, logits)
        started = time.perf_counter()
        searched = [
            each if each is None or seen is None else each.asked_by(own, logits.scale, seen)
            for each, own, seen in zip(searched, queries, self._seen, strict=True)
        ]
        turned = LAYER_STEP * layer
        out, drawn = native.attend(
            queries, rows, mask, searched, rotation=turned, scale=logits.scale
        )
        # The call is all sessions': each that retrieves has an equal part of its time.
        retrieving = sum(each is not None for each in self.retrievers)
        seconds = (time.perf_counter() - started) / retrieving
        for retriever, heads in zip(self.retrievers, drawn[:, :, 0].tolist(), strict=True):
            if retriever is not None:
                retriever.count_found(layer, sum(heads), seconds)
        return out

    def _search_rows(self, layer: int) -> list[SearchedRows | None] | None:
        """Of each session the rows of a layer, None for one that retrieves nothing.

        None in all if native code does not search a session's rows.
        """
        searched = [None if each is None else each.searched_rows(layer) for each in self.retrievers]
        pairs = zip(self.retrievers, searched, strict=True)
        return None if any(each is not None and rows is None for each, rows in pairs) else searched

    @cached_property
    def searched_rows(self) -> list[SearchedRows | None] | None:
        """Of each session the rows of the first layer, None for one that retrieves nothing.

        None in all if native code does not search a session's rows, in every layer alike.
        """
        return self._search_rows(0)

    def count(self, rows: Sequence[int], seconds: float) -> None:
        """Count what was found for each session in all layers together, and the time of all sessions."""
        retrieving = sum(each is not None for each in self.retrievers)
        for retriever, found in zip(self.retrievers, rows, strict=True):
            if retriever is not None:
                retriever.count_found(0, found, seconds / retrieving)

    def extend(
        self,
        layer: int,
        queries: Tensor,
        rows: tuple[Tensor, Tensor, Tensor],
        mask: Tensor | None,
        logits: Logits,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Extend a layer's rows by those that are found; arguments as `attend`.

        Returns keys, values and mask of n + r rows, r of the session that has most; the others' are masked.
        """
        keys, values, active = rows
        host_queries, host_active = queries.detach().cpu(), active.cpu()
        found = [
            None
            if retriever is None
            else retriever.find(layer, host_queries[index], host_active[index], logits.scale, seen)
            for index, (retriever, seen) in enumerate(zip(self.retrievers, self._seen, strict=True))
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
