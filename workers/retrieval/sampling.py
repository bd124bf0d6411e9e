"""Choice of the rows that a step retrieves, by their attention weights."""

import torch
from torch import Tensor

# Rounds in which rows that are certain to be drawn leave their surplus to the others.
_ROUNDS = 2
# Weights may underflow to 0; a row that may be drawn has some.
_LEAST = 1e-30


def take_best(weights: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Take each head's rows of most weight.

    weights: float32 `[n_kv_heads, n]`, negative where a row may not be taken. Returns indices, int64
    `[n_kv_heads, min(count, n)]`, the best first, -1 for none, and as bias 0, or -inf for none.
    """
    best = weights.topk(min(count, weights.shape[1]), dim=1)
    none = best.values < 0
    bias = torch.zeros_like(best.values).masked_fill_(none, -torch.inf)
    return best.indices.masked_fill(none, -1), bias


def draw(weights: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Draw each head's rows in proportion to their weights, no row twice.

    A row's chance is `min(1, c * weight)`, with c such that about `count` rows are drawn, and its
    bias is minus the chance's logarithm. So a drawn row stands for those like it that are not, and
    over many draws the sums over the rows in a softmax, numerator and denominator, are the exact
    ones; rows of much weight are certain, and stand for themselves alone. The draw is a systematic
    one without chance: rows are laid out by position, each as long as its chance, and those are
    drawn that cover the middle of a unit.

    Arguments and result as `take_best`; indices ascend.

    Source: Madow, "On the Theory of Systematic Sampling, II" (1949); Horvitz and Thompson (1952).
    """
    weights = weights.double()
    weights = torch.where(weights < 0, 0, weights.clamp(min=_LEAST))
    factor = count / weights.sum(1, keepdim=True)
    for _ in range(_ROUNDS):
        certain = weights * factor >= 1
        rest = weights.masked_fill(certain, 0).sum(1, keepdim=True)
        left = count - certain.sum(1, keepdim=True)
        factor = torch.where(rest > 0, left / rest, factor)
    chances = (weights * factor).clamp(max=1)
    ends = chances.cumsum(1)
    middles = torch.arange(count, dtype=torch.float64).add(0.5).expand(len(weights), -1)
    drawn = torch.searchsorted(ends, middles.contiguous())
    none = drawn == weights.shape[1]
    drawn = drawn.clamp(max=weights.shape[1] - 1)
    bias = -chances.gather(1, drawn).log().float()
    return drawn.masked_fill(none, -1), bias.masked_fill(none, -torch.inf)
