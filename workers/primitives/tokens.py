"""Tokens of a set of rows: per-token values without a vector over the whole session."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.cache.active_cache import EMPTY
from workers.parallel.alone import Alone
from workers.parallel.group import Group
from workers.parallel.sums import sum_own


@dataclass(frozen=True)
class TokenIndex:
    """The distinct tokens of some layers' rows, and the token of each row.

    Its size is that of the rows, however long the session is.

    Attributes:
        count: Number of distinct tokens; absent rows together count as one.
        tokens: Their positions, ascending.
        rows: Per layer the index of each row's token, int64 `[n_kv_heads, n]`.
    """

    count: int
    tokens: Tensor
    rows: tuple[Tensor, ...]

    @classmethod
    def from_positions(cls, positions: Sequence[Tensor]) -> "TokenIndex":
        """Index the tokens of positions, per layer int `[n_kv_heads, n]`."""
        # Layers with the same rows, as in a pass over all stored ones, give the same tensor.
        distinct = list({id(layer): layer for layer in positions}.values())
        if not distinct:
            return cls(0, torch.empty(0, dtype=torch.int32), ())
        rows = torch.cat([layer.flatten() for layer in distinct])
        tokens, flat = torch.unique(rows, return_inverse=True)
        parts = flat.split([layer.numel() for layer in distinct])
        by_layer = {
            id(layer): part.view(layer.shape) for layer, part in zip(distinct, parts, strict=True)
        }
        return cls(len(tokens), tokens, tuple(by_layer[id(layer)] for layer in positions))

    def means(self, scores: Sequence[Tensor], group: Group = Alone()) -> Tensor:
        """Mean of each token's scores over all layers and heads that hold it: float32 `[count]`.

        group: the ranks that have the other heads.
        """
        total = torch.zeros(2, self.count, dtype=torch.float64, device=scores[0].device)
        for layer_scores, rows in zip(scores, self.rows, strict=True):
            values = layer_scores.flatten().double()
            total.index_add_(1, rows.flatten(), torch.stack([values, torch.ones_like(values)]))
        sums, count = sum_own(group, self.tokens, total)
        means: Tensor = (sums / count.clamp(min=1)).float()
        return means


def over_heads(scores: Tensor, positions: Tensor, group: Group = Alone()) -> Tensor:
    """Give every head the sum of all heads' scores of a token, float32 `[n_kv_heads, n]`.

    Heads that do not hold the token add nothing; absent rows get 0. group: the ranks that have the
    other heads.
    """
    tokens = TokenIndex.from_positions([positions])
    by_token = torch.zeros(1, tokens.count, dtype=torch.float64, device=scores.device)
    present = scores.masked_fill(positions == EMPTY, 0.0).double()
    by_token.index_add_(1, tokens.rows[0].flatten(), present.view(1, -1))
    total: Tensor = sum_own(group, tokens.tokens, by_token)[0].float()
    return total[tokens.rows[0]]


def over_chunks(scores: Tensor, positions: Tensor, chunk: int, *, mean: bool = False) -> Tensor:
    """Give every row the score of its chunk: the sum over the head's rows of the chunk's tokens.

    Chunk i is the tokens `i * chunk .. (i+1) * chunk - 1`; positions are ascending. With `mean` it
    is the mean over its rows, which does not penalise a short chunk. Rows of one chunk get exactly
    the same score; absent rows get 0.

    Source: ChunkKV, Algorithm 1.
    """
    if not positions.numel():
        return torch.zeros_like(scores)
    ids = positions // chunk
    # The head's first chunk is 0, its next one 1: as many as the head has rows at most.
    index = torch.nn.functional.pad((ids[:, 1:] != ids[:, :-1]).cumsum(1), (1, 0))
    chunks = int(index.max()) + 1
    within = (index * chunk + positions % chunk).long()

    def total(values: Tensor) -> Tensor:
        laid_out = torch.zeros(len(values), chunks * chunk, device=values.device)
        laid_out.scatter_(1, within, values.masked_fill(positions == EMPTY, 0.0))
        return laid_out.view(len(values), chunks, chunk).sum(-1)

    totals = total(scores)
    if mean:
        totals = totals / total(torch.ones_like(scores)).clamp(min=1)
    return totals.gather(1, index)
