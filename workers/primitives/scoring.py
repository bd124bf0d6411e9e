"""Scores of rows: pure functions of queries, keys and positions; higher scores are kept longer.

Unless stated otherwise, positions are int `[n_kv_heads, n]`, `EMPTY` where there is no row, and
scores are float32 `[n_kv_heads, n]`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvrecall.domain.settings.methods import Reduction
from workers.cache.active_cache import EMPTY


@dataclass(frozen=True)
class AttentionPooling:
    """How attention becomes a score: over a KV head's group, then over `width` neighbouring tokens."""

    group: Reduction = "mean"
    width: int = 1
    kind: Reduction = "max"


# Attention weights in memory at a time: 128 MiB.
_MAX_WEIGHTS = 1 << 25


def attention(
    queries: Tensor,
    keys: Tensor,
    key_positions: Tensor,
    query_positions: Tensor,
    extra_logsumexp: Tensor | None = None,
) -> Tensor:
    """Attention of observed queries over a layer's rows: the softmax over every visible key.

    Args:
        queries: `[n_heads, t, head_dim]`.
        keys: `[n_kv_heads, n, head_dim]`.
        key_positions: int `[n_kv_heads, n]`.
        query_positions: int `[t]`.
        extra_logsumexp: Log-sum-exp of the logits of keys that are not rows, float32
            `[n_heads, t]` (`observation.causal_logsumexp`); they take their part of the softmax.

    Returns:
        Weights, float32 `[n_kv_heads, group, t, n]`; zero where a key is after its query.
    """
    n_heads, tokens, head_dim = queries.shape
    n_kv_heads = keys.shape[0]
    grouped = queries.float().reshape(n_kv_heads, -1, head_dim)
    logits = (grouped @ keys.float().transpose(1, 2)) * head_dim**-0.5
    logits = logits.view(n_kv_heads, n_heads // n_kv_heads, tokens, keys.shape[1])
    visible = key_positions[:, None, None, :] <= query_positions[:, None]
    logits = logits.masked_fill(~visible, torch.finfo(torch.float32).min)
    if extra_logsumexp is not None:
        logits = torch.cat([logits, extra_logsumexp.view(*logits.shape[:3], 1)], dim=-1)
    weights: Tensor = logits.softmax(-1)[..., : keys.shape[1]].masked_fill(~visible, 0.0)
    return weights


def attention_in_chunks(
    queries: Tensor,
    keys: Tensor,
    key_positions: Tensor,
    query_positions: Tensor,
    extra_logsumexp: Tensor | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Compute `attention` for a chunk of the queries at a time, in bounded memory.

    Yields the chunk's query positions, int `[c]`, and its weights.
    """
    n_heads, count, _ = queries.shape
    size = max(1, _MAX_WEIGHTS // max(1, n_heads * keys.shape[1]))
    for start in range(0, count, size):
        chunk = slice(start, start + size)
        extra = None if extra_logsumexp is None else extra_logsumexp[:, chunk]
        positions = query_positions[chunk]
        yield positions, attention(queries[:, chunk], keys, key_positions, positions, extra)


def attention_scores(
    queries: Tensor,
    keys: Tensor,
    key_positions: Tensor,
    query_positions: Tensor,
    extra_logsumexp: Tensor | None = None,
    *,
    tokens: Reduction = "max",
    group: Reduction = "max",
) -> Tensor:
    """Reduce `attention` over the observed tokens, then over a KV head's group.

    Arguments as in `attention`; t may be 0, then every row has the score 0. Returns float32
    `[n_kv_heads, n]`. EpiCache, eq. 3, takes the max over both; SnapKV the mean over its window.
    """
    n_heads, count, _ = queries.shape
    n_kv_heads, n = key_positions.shape
    if not count or not n:
        return torch.zeros(n_kv_heads, n, device=keys.device)
    reduced = torch.zeros(n_kv_heads, n_heads // n_kv_heads, n, device=keys.device)
    for _, weights in attention_in_chunks(
        queries, keys, key_positions, query_positions, extra_logsumexp
    ):
        reduced = (
            torch.maximum(reduced, weights.amax(2)) if tokens == "max" else reduced + weights.sum(2)
        )
    return reduce(reduced if tokens == "max" else reduced / count, group, 1)


def smooth(scores: Tensor, positions: Tensor, width: int, pooling: Reduction = "max") -> Tensor:
    """Pool scores over neighbouring tokens, so that a row's neighbours are kept with it.

    A row's neighbours are the resident rows of its head among the `width` positions around its own.
    Evicted neighbours do not count, however near the rows beside them are in the cache; positions
    before the first row and after the last one count 0. Scores are 0 or more, positions ascending.

    Source: SnapKV, section 4, which pools once, over contiguous rows.
    """
    if width <= 1 or not scores.numel():
        return scores
    before = min(width // 2, scores.shape[1] - 1)
    after = min(width - 1 - width // 2, scores.shape[1] - 1)
    pooled = torch.zeros_like(scores)
    resident = torch.zeros_like(scores)
    for offset in range(-before, after + 1):
        rows, neighbours = _pairs_at(offset, scores.shape[1])
        distance = positions[:, neighbours] - positions[:, rows]
        near = (distance >= -(width // 2)) & (distance < width - width // 2)
        score = scores[:, neighbours].masked_fill(~near, 0.0)
        if pooling == "max":
            pooled[:, rows] = torch.maximum(pooled[:, rows], score)
        else:
            pooled[:, rows] += score
            resident[:, rows] += near
    if pooling == "max":
        return pooled
    first = positions.amin(1, keepdim=True)
    last = positions.masked_fill(positions == EMPTY, -1).amax(1, keepdim=True)
    start = torch.maximum(positions - width // 2, first)
    stop = torch.minimum(positions.clamp(max=EMPTY - width) + width - width // 2, last + 1)
    evicted = stop - start - resident
    return pooled / (width - evicted)


def smooth_before(
    scores: Tensor, positions: Tensor, first: int, width: int, pooling: Reduction = "max"
) -> Tensor:
    """Apply `smooth` to the rows before position `first` only; later rows are left out of it.

    The observation window attends to itself most; its neighbours must not profit from that
    (SnapKV).
    """
    before = positions < first
    smoothed = smooth(scores.masked_fill(~before, 0.0), positions, width, pooling)
    return torch.where(before, smoothed, scores)


def recency(positions: Tensor, sinks: int) -> Tensor:
    """Score by position alone: the first `sinks` tokens highest, then the later the higher.

    Source: StreamingLLM, section 3.2.
    """
    return torch.where(positions < sinks, torch.finfo(torch.float32).max, positions.float())


def cosine_to_mean(keys: Tensor, positions: Tensor) -> Tensor:
    """Cosine of each key, `[n_kv_heads, n, head_dim]`, to the mean direction of its head's keys.

    Source: KeyDiff, section 3.
    """
    directions = torch.nn.functional.normalize(keys.float(), dim=-1)
    resident = (positions != EMPTY)[..., None]
    count = resident.sum(1, keepdim=True).clamp(min=1)
    mean = torch.where(resident, directions, 0.0).sum(1, keepdim=True) / count
    cosine: Tensor = torch.nn.functional.cosine_similarity(directions, mean, dim=-1)
    return cosine


def row_ranks(scores: Tensor, positions: Tensor) -> Tensor:
    """Rank of each row among its head's scores: 0 for the lowest to 1 for the highest.

    Of equal scores the earlier row ranks higher; absent rows get 0. Returns float32
    `[n_kv_heads, n]`.
    """
    resident = positions != EMPTY
    order = scores.masked_fill(~resident, -torch.inf).flip(1).argsort(dim=1, stable=True)
    indices = torch.arange(order.shape[1], device=order.device).expand_as(order)
    ranks = torch.empty_like(order).scatter_(1, order, indices).flip(1)
    above_absent = ranks - (~resident).sum(1, keepdim=True)
    highest = (resident.sum(1, keepdim=True) - 1).clamp(min=1)
    return torch.where(resident, above_absent / highest, 0.0)


def reduce(values: Tensor, how: Reduction, dim: int) -> Tensor:
    """Reduce one dimension."""
    return values.amax(dim) if how == "max" else values.mean(dim)


def _pairs_at(offset: int, n: int) -> tuple[slice, slice]:
    """Slices of the rows that have a neighbour `offset` rows further on, and of the neighbours."""
    rows = slice(max(0, -offset), n - max(0, offset))
    return rows, slice(rows.start + offset, rows.stop + offset)
