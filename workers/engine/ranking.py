"""Combines a method's scores with the episode's similarity, for evictions and episode builds."""

from collections.abc import Sequence

import torch
from torch import Tensor

from workers.cache.active_cache import EMPTY
from workers.methods import LayerRows, Method
from workers.primitives.scoring import gather_token_values, row_ranks, token_means


def rank_rows(method: Method, layers: Sequence[LayerRows], similarity: Tensor) -> list[Tensor]:
    """Rank each layer's rows; higher is kept longer: float32 `[n_kv_heads, n]` per layer.

    similarity: float32 `[m]`, the similarity of each of the first m tokens' segments to the active
    episode, 0 to 1. Tokens after them count as part of the episode. m = 0: there is no episode.
    """
    end = layers[0].end if layers else 0
    return combine_scores(
        method,
        [method.scores(rows) for rows in layers],
        [rows.positions for rows in layers],
        end,
        similarity,
    )


def combine_scores(
    method: Method,
    scores: Sequence[Tensor],
    positions: Sequence[Tensor],
    end: int,
    similarity: Tensor,
) -> list[Tensor]:
    """Combine a method's own scores, float32 `[n_kv_heads, n]` per layer, for `rank_rows`.

    The scores are unchanged unless the method keeps tokens whole or weighs the topic. Then they
    become ranks within their layer and head, which can be averaged over layers and heads and added
    to the similarity.
    """
    weighs_topic = bool(method.topic) and bool(similarity.numel())
    if not (method.whole_tokens or weighs_topic) or not scores:
        return list(scores)
    ranks = [row_ranks(score, held) for score, held in zip(scores, positions, strict=True)]
    if method.whole_tokens:
        means = token_means(ranks, positions, end)
        ranks = [gather_token_values(means, held) for held in positions]
    if weighs_topic:
        token_similarity = torch.ones(end, device=ranks[0].device)
        token_similarity[: len(similarity)] = similarity[:end]
        ranks = [
            rank + method.topic * gather_token_values(token_similarity, held)
            for rank, held in zip(ranks, positions, strict=True)
        ]
    return [
        rank.masked_fill(held == EMPTY, 0.0) for rank, held in zip(ranks, positions, strict=True)
    ]
