"""Scores of rows: pure functions of queries, keys and positions. Higher is worth more."""

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from workers.cache.active_cache import EMPTY

Reduction = Literal["max", "mean"]
"""How many weights become one score."""

_WEIGHTS_AT_ONCE = 1 << 25
"""Attention weights held at a time: 128 MiB of them."""


def attention(
    queries: Tensor,
    keys: Tensor,
    key_positions: Tensor,
    query_positions: Tensor,
    extra_logsumexp: Tensor | None = None,
) -> Tensor:
    """Attention of observed queries over a layer's rows: the softmax over every key that the query may see.

    queries `[n_heads, t, head_dim]`, keys `[n_kv_heads, n, head_dim]`, key_positions int `[n_kv_heads, n]`,
    query_positions int `[t]`. extra_logsumexp: float32 `[n_heads, t]`, the logarithm of the weight of keys that are no rows
    (`observation.causal_logsumexp`), which takes its part of the softmax. Returns float32 `[n_kv_heads, group, t, n]`, zero
    where a key is after its query.
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
    """`attention` of some of the queries at a time, with their positions: many queries take no more memory than few."""
    n_heads, count, _ = queries.shape
    piece = max(1, _WEIGHTS_AT_ONCE // max(1, n_heads * keys.shape[1]))
    for start in range(0, count, piece):
        part = slice(start, start + piece)
        own = None if extra_logsumexp is None else extra_logsumexp[:, part]
        at = query_positions[part]
        yield at, attention(queries[:, part], keys, key_positions, at, own)


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
    """How much observed queries attend to each row: `attention`, reduced over the tokens, then over the group.

    Shapes as in `attention`; t may be 0, then every row has the score 0. Returns float32 `[n_kv_heads, n]`.
    EpiCache eq. 3 takes max over both; SnapKV takes the mean over its window.
    """
    n_heads, count, _ = queries.shape
    n_kv_heads, n = key_positions.shape
    reduced = torch.zeros(n_kv_heads, n_heads // n_kv_heads, n, device=keys.device)
    if not count or not n:
        return torch.zeros(n_kv_heads, n, device=keys.device)
    for _, weights in attention_in_chunks(
        queries, keys, key_positions, query_positions, extra_logsumexp
    ):
        reduced = (
            torch.maximum(reduced, weights.amax(2)) if tokens == "max" else reduced + weights.sum(2)
        )
    return _reduce(reduced if tokens == "max" else reduced / count, group, 1)


def smooth(scores: Tensor, width: int, pooling: Reduction = "max") -> Tensor:
    """Pool `[n_kv_heads, n]` along the sequence, so that a row's neighbours live with it (SnapKV, section 4).

    Scores are 0 or more; past the ends there are zeros.
    """
    if width <= 1 or not scores.numel():
        return scores
    pool = torch.nn.functional.max_pool1d if pooling == "max" else torch.nn.functional.avg_pool1d
    padded: Tensor = pool(scores[None], width, stride=1, padding=width // 2)[0]
    return padded[:, : scores.shape[1]]


def smooth_before(
    scores: Tensor, positions: Tensor, first: int, width: int, pooling: Reduction = "max"
) -> Tensor:
    """`smooth` for the rows before position `first` alone; what later rows score is neither spread nor changed.

    The observation window attends to itself most of all, and its neighbours are not to live by that (SnapKV).
    scores float32, positions int, both `[n_kv_heads, n]`.
    """
    before = positions < first
    return torch.where(before, smooth(scores.masked_fill(~before, 0.0), width, pooling), scores)


def recency(positions: Tensor, sinks: int) -> Tensor:
    """Score by position alone: the first `sinks` tokens over all, then the later the better (StreamingLLM).

    positions: int `[n_kv_heads, n]`, `EMPTY` where there is no row. Returns float32 `[n_kv_heads, n]`.
    """
    return torch.where(positions < sinks, torch.finfo(torch.float32).max, positions.float())


def over_heads(scores: Tensor, positions: Tensor, end: int) -> Tensor:
    """Give every head the sum of all heads' scores of a token; a head that does not hold it adds nothing.

    scores float32, positions int, both `[n_kv_heads, n]`; `end` is after the last position. The same shape again.
    """
    totals = _by_position(scores, positions, end).sum(0)
    return totals[_places(positions, end)]


def over_chunks(
    scores: Tensor, positions: Tensor, end: int, chunk: int, *, mean: bool = False
) -> Tensor:
    """Give every row what its chunk scores in its head: the sum over the held tokens `i * chunk .. (i+1) * chunk - 1`.

    With `mean`, the mean over them, which does not put a short chunk at a disadvantage. Shapes as in `over_heads`;
    rows of one chunk get exactly the same score (ChunkKV, Algorithm 1).
    """
    n_chunks = -(-end // chunk)

    def total(values: Tensor) -> Tensor:
        laid = _by_position(values, positions, n_chunks * chunk)[:, :-1]
        return laid.reshape(len(laid), n_chunks, chunk).sum(-1)

    totals = total(scores)
    if mean:
        totals = totals / total(torch.ones_like(scores)).clamp(min=1)
    return totals.gather(1, (positions // chunk).clamp(max=n_chunks - 1).long())


def cosine_to_mean(keys: Tensor, positions: Tensor) -> Tensor:
    """Cosine of each key to the mean of the head's keys at unit length: float32 `[n_kv_heads, n]` (KeyDiff, section 3).

    keys `[n_kv_heads, n, head_dim]`, positions int `[n_kv_heads, n]`; rows that are not there do not count.
    """
    directions = torch.nn.functional.normalize(keys.float(), dim=-1)
    held = (positions != EMPTY)[..., None]
    mean = torch.where(held, directions, 0.0).sum(1, keepdim=True) / held.sum(
        1, keepdim=True
    ).clamp(min=1)
    cosine: Tensor = torch.nn.functional.cosine_similarity(directions, mean, dim=-1)
    return cosine


def row_ranks(scores: Tensor, positions: Tensor) -> Tensor:
    """Each row's place in its head's order of scores, 0 for the lowest to 1 for the highest; ties: the earlier first.

    scores float32, positions int, both `[n_kv_heads, n]`; rows that are not there get 0. The same shape again.
    """
    held = positions != EMPTY
    order = scores.masked_fill(~held, -torch.inf).flip(1).argsort(dim=1, stable=True)
    places = torch.empty_like(order).scatter_(
        1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
    )
    above_missing = places.flip(1) - (~held).sum(1, keepdim=True)
    return torch.where(held, above_missing / (held.sum(1, keepdim=True) - 1).clamp(min=1), 0.0)


def token_means(scores: Sequence[Tensor], positions: Sequence[Tensor], end: int) -> Tensor:
    """Each token's mean over all layers and heads that hold it: float32 `[end]`, 0 for a token that none holds.

    scores float32, positions int, per layer `[n_kv_heads, n]`.
    """
    total = torch.zeros(end + 1, device=scores[0].device)
    count = torch.zeros_like(total)
    for score, held in zip(scores, positions, strict=True):
        places = _places(held, end).flatten()
        total.index_add_(0, places, score.flatten().float())
        count.index_add_(0, places, torch.ones_like(places, dtype=torch.float32))
    return (total / count.clamp(min=1))[:end]


def gather_token_values(values: Tensor, positions: Tensor) -> Tensor:
    """Values of tokens, `[end]`, for the rows at `positions` int `[n_kv_heads, n]`; where no row is, any."""
    return values[positions.clamp(max=len(values) - 1).long()]


def _by_position(scores: Tensor, positions: Tensor, end: int) -> Tensor:
    """Scores laid out by token: float32 `[n_kv_heads, end + 1]`, 0 where a head holds nothing; the last is waste."""
    laid = torch.zeros(positions.shape[0], end + 1, device=scores.device)
    laid.scatter_(1, _places(positions, end), scores)
    laid[:, end] = 0
    return laid


def _places(positions: Tensor, end: int) -> Tensor:
    return positions.clamp(max=end).long()


def _reduce(values: Tensor, how: Reduction, dim: int) -> Tensor:
    return values.amax(dim) if how == "max" else values.mean(dim)
