"""How a method and an episode together rank rows: one function for evictions and for building episodes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from workers.cache.active_cache import EMPTY
from workers.methods import LayerRows, Method
from workers.primitives.scoring import gather_token_values, row_ranks, token_means


def ranked(method: Method, layers: Sequence[LayerRows], nearness: Tensor) -> list[Tensor]:
    """Each layer's rows by what keeps them, higher is kept longer: float32 `[n_kv_heads, n]` per layer.

    nearness: float32 `[m]`, how near each of the first m tokens' segments is to the active episode, 0 to 1; tokens
    after them count as of the episode; m = 0: there is no episode.
    """
    end = layers[0].end if layers else 0
    return combined(
        method,
        [method.scores(rows) for rows in layers],
        [rows.positions for rows in layers],
        end,
        nearness,
    )


def combined(
    method: Method,
    scores: Sequence[Tensor],
    positions: Sequence[Tensor],
    end: int,
    nearness: Tensor,
) -> list[Tensor]:
    """A method's own scores, float32 `[n_kv_heads, n]` per layer, as `ranked` gives them.

    They come back unchanged unless the method keeps tokens whole or weighs the topic: then they become ranks within
    their layer and head, which can be averaged over layers and heads and added to.
    """
    weighs_topic = bool(method.topic) and bool(nearness.numel())
    if not (method.whole_tokens or weighs_topic) or not scores:
        return list(scores)
    found = [row_ranks(score, held) for score, held in zip(scores, positions, strict=True)]
    if method.whole_tokens:
        means = token_means(found, positions, end)
        found = [gather_token_values(means, held) for held in positions]
    if weighs_topic:
        near = torch.ones(end, device=found[0].device)
        near[: len(nearness)] = nearness[:end]
        found = [
            score + method.topic * gather_token_values(near, held)
            for score, held in zip(found, positions, strict=True)
        ]
    return [
        score.masked_fill(held == EMPTY, 0.0) for score, held in zip(found, positions, strict=True)
    ]
