"""What every query adds to the rows that it attends to, for methods that judge rows by all queries so far."""

from collections.abc import Sequence

import torch
from torch import Tensor

from workers.cache.active_cache import ActiveCache
from workers.primitives.scoring import attention_in_chunks


def accumulate(
    cache: ActiveCache, slot: int, queries: Sequence[Tensor], query_positions: Tensor, kind: str
) -> None:
    """Add to a slot's rows what some tokens' queries give them, after these tokens' own rows were appended.

    queries: per layer `[n_heads, t, head_dim]`, post-RoPE; query_positions: int32 `[t]`; kind as in `Observation`.
    """
    for layer, of_layer in enumerate(queries):
        keys, _, positions = cache.get_rows(slot, layer)
        cache.accumulate(slot, layer, received(of_layer, keys, positions, query_positions, kind))


def received(
    queries: Tensor, keys: Tensor, key_positions: Tensor, query_positions: Tensor, kind: str
) -> Tensor:
    """What each row gets, summed over the queries, mean over a KV head's group: float32 `[n_kv_heads, n]`.

    "attention": the weights of the softmax (H2O). "hits": one for each query that gives the row more than it would if
    it attended to all that it sees alike (Scissorhands). Shapes as in `scoring.attention`, whose pieces this adds up.
    """
    total = torch.zeros(key_positions.shape, device=keys.device)
    for at, weights in attention_in_chunks(queries, keys, key_positions, query_positions):
        if kind == "hits":
            seen = (key_positions[:, None, :] <= at[:, None]).sum(-1)
            weights = (weights * seen[:, None, :, None] > 1).float()
        total += weights.sum(2).mean(1)
    return total
