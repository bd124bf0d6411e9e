"""Scores of rows: pure functions of queries, keys and positions; higher scores are kept longer.

Unless stated otherwise, positions are int `[n_kv_heads, n]`, `EMPTY` where there is no row, and
scores are float32 `[n_kv_heads, n]`.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from workers.cache.active_cache import EMPTY

# Reduction of several attention weights to one score.
Reduction = Literal["max", "mean"]

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
    return _reduce(reduced if tokens == "max" else reduced / count, group, 1)


def smooth(scores: Tensor, width: int, pooling: Reduction = "max") -> Tensor:
    """Pool scores along the sequence, so that a row's neighbours are kept with it.

    Scores are 0 or more; zeros are padded at both ends. Source: SnapKV, section 4.
    """
    if width <= 1 or not scores.numel():
        return scores
    pool = torch.nn.functional.max_pool1d if pooling == "max" else torch.nn.functional.avg_pool1d
    padded: Tensor = pool(scores[None], width, stride=1, padding=width // 2)[0]
    return padded[:, : scores.shape[1]]


def smooth_before(
    scores: Tensor, positions: Tensor, first: int, width: int, pooling: Reduction = "max"
) -> Tensor:
    """Apply `smooth` to the rows before position `first` only; later rows are left out of it.

    The observation window attends to itself most; its neighbours must not profit from that
    (SnapKV).
    """
    before = positions < first
    return torch.where(before, smooth(scores.masked_fill(~before, 0.0), width, pooling), scores)


def recency(positions: Tensor, sinks: int) -> Tensor:
    """Score by position alone: the first `sinks` tokens highest, then the later the higher.

    Source: StreamingLLM, section 3.2.
    """
    return torch.where(positions < sinks, torch.finfo(torch.float32).max, positions.float())


def over_heads(scores: Tensor, positions: Tensor, end: int) -> Tensor:
    """Give every head the sum of all heads' scores of a token.

    Heads that do not hold the token add nothing. `end` is the position after the last one.
    """
    totals = _by_position(scores, positions, end).sum(0)
    return totals[_clamp(positions, end)]


def over_chunks(
    scores: Tensor, positions: Tensor, end: int, chunk: int, *, mean: bool = False
) -> Tensor:
    """Give every row the score of its chunk: the sum over the head's rows of the chunk's tokens.

    Chunk i is the tokens `i * chunk .. (i+1) * chunk - 1`. With `mean` it is the mean over its
    rows, which does not penalise a short chunk. Rows of one chunk get exactly the same score.

    Source: ChunkKV, Algorithm 1.
    """
    n_chunks = -(-end // chunk)

    def total(values: Tensor) -> Tensor:
        by_position = _by_position(values, positions, n_chunks * chunk)[:, :-1]
        return by_position.reshape(len(by_position), n_chunks, chunk).sum(-1)

    totals = total(scores)
    if mean:
        totals = totals / total(torch.ones_like(scores)).clamp(min=1)
    return totals.gather(1, (positions // chunk).clamp(max=n_chunks - 1).long())


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


def token_means(scores: Sequence[Tensor], positions: Sequence[Tensor], end: int) -> Tensor:
    """Mean of each token's scores over all layers and heads that hold it: float32 `[end]`.

    scores and positions per layer; a token without any row gets 0.
    """
    total = torch.zeros(end + 1, device=scores[0].device)
    count = torch.zeros_like(total)
    for layer_scores, layer_positions in zip(scores, positions, strict=True):
        tokens = _clamp(layer_positions, end).flatten()
        total.index_add_(0, tokens, layer_scores.flatten().float())
        count.index_add_(0, tokens, torch.ones_like(tokens, dtype=torch.float32))
    return (total / count.clamp(min=1))[:end]


def gather_token_values(values: Tensor, positions: Tensor) -> Tensor:
    """Gather per-token values, `[end]`, for the rows at `positions`; arbitrary for absent rows."""
    return values[positions.clamp(max=len(values) - 1).long()]


def _by_position(scores: Tensor, positions: Tensor, end: int) -> Tensor:
    """Scores by token: float32 `[n_kv_heads, end + 1]`, 0 for absent rows; the last is unused."""
    by_position = torch.zeros(positions.shape[0], end + 1, device=scores.device)
    by_position.scatter_(1, _clamp(positions, end), scores)
    by_position[:, end] = 0
    return by_position


def _clamp(positions: Tensor, end: int) -> Tensor:
    return positions.clamp(max=end).long()


def _reduce(values: Tensor, how: Reduction, dim: int) -> Tensor:
    return values.amax(dim) if how == "max" else values.mean(dim)
