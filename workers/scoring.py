"""Scores of rows: pure functions of queries and keys. Higher is worth more."""

import torch
from torch import Tensor


def attention(queries: Tensor, keys: Tensor, key_positions: Tensor, query_positions: Tensor) -> Tensor:
    """Attention of observed queries over a layer's rows: the softmax over every key that the query may see.

    queries `[n_heads, t, head_dim]`, keys `[n_kv_heads, n, head_dim]`, key_positions int `[n_kv_heads, n]`,
    query_positions int `[t]`. Returns float32 `[n_kv_heads, group, t, n]`, zero where a key is after its query.
    """
    n_heads, tokens, head_dim = queries.shape
    n_kv_heads = keys.shape[0]
    grouped = queries.float().reshape(n_kv_heads, -1, head_dim)
    logits = (grouped @ keys.float().transpose(1, 2)) * head_dim**-0.5
    logits = logits.view(n_kv_heads, n_heads // n_kv_heads, tokens, -1)
    visible = key_positions[:, None, None, :] <= query_positions[:, None]
    logits = logits.masked_fill(~visible, torch.finfo(torch.float32).min)
    weights: Tensor = logits.softmax(-1).masked_fill(~visible, 0.0)
    return weights


def over_tokens_and_group(weights: Tensor, *, tokens: str = "max", group: str = "max") -> Tensor:
    """Reduce `[n_kv_heads, group, t, n]` to `[n_kv_heads, n]`, by "max" or "mean" over tokens, then over the group.

    EpiCache eq. 3 takes max over both; SnapKV takes the mean over its window.
    """
    return _reduce(_reduce(weights, tokens, 2), group, 1)


def smooth(scores: Tensor, width: int) -> Tensor:
    """Max-pool `[n_kv_heads, n]` along the sequence, so that a row's neighbours live with it (SnapKV)."""
    if width <= 1:
        return scores
    padded = torch.nn.functional.max_pool1d(scores[None], width, stride=1, padding=width // 2)[0]
    return padded[:, : scores.shape[1]]


def recency(positions: Tensor, sinks: int) -> Tensor:
    """Score by position alone: the first `sinks` tokens over all, then the later the better (StreamingLLM).

    positions: int `[n_kv_heads, n]`, `workers.cache.EMPTY` where there is no row. Returns float32 `[n_kv_heads, n]`.
    """
    return torch.where(positions < sinks, torch.finfo(torch.float32).max, positions.float())


def _reduce(values: Tensor, how: str, dim: int) -> Tensor:
    return values.amax(dim) if how == "max" else values.mean(dim)
