"""Accumulated attention: each query's weights on the rows, for methods that sum them up."""

from collections.abc import Sequence

import torch
from torch import Tensor

from workers.cache.active_cache import ActiveCache
from workers.primitives.scoring import attention_in_chunks


def received_weights(
    cache: ActiveCache,
    slot: int,
    queries: Sequence[Tensor],
    query_positions: Tensor,
    kind: str,
    again: range = range(0),
) -> list[Tensor]:
    """Weights of some tokens' queries on a slot's rows; these tokens' rows are appended.

    queries: per layer `[n_heads, t, head_dim]`, post-RoPE; query_positions: int32 `[t]`; kind as in
    `Observation.accumulate`. again: positions of tokens that are computed a second time: rows before
    them have their weights already. Returns per layer float32 `[n_kv_heads, n]`.
    """
    received = []
    for layer, layer_queries in enumerate(queries):
        keys, _, positions = cache.get_rows(slot, layer)
        received.append(
            received_weight(layer_queries, keys, positions, query_positions, kind, again)
        )
    return received


def received_weight(
    queries: Tensor,
    keys: Tensor,
    key_positions: Tensor,
    query_positions: Tensor,
    kind: str,
    again: range = range(0),
) -> Tensor:
    """Weight that each row receives, summed over the queries: float32 `[n_kv_heads, n]`.

    The mean over a KV head's group of query heads. "attention": softmax weights (H2O). "hits": 1
    for each query that gives the row more than a uniform distribution over its visible rows would
    (Scissorhands). Shapes as in `scoring.attention_in_chunks`; again as in `received_weights`.
    """
    total = torch.zeros(key_positions.shape, device=keys.device)
    for at, weights in attention_in_chunks(queries, keys, key_positions, query_positions):
        if kind == "hits":
            visible = (key_positions[:, None, :] <= at[:, None]).sum(-1)
            weights = (weights * visible[:, None, :, None] > 1).float()
        if again:
            known = (at < again.stop)[:, None] & (key_positions < again.start)[:, None, :]
            weights = weights.masked_fill(known[:, None], 0)
        total += weights.sum(2).mean(1)
    return total
