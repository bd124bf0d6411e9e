"""Choice of the rows that a step retrieves, by their attention weights."""

import torch
from torch import Tensor

# A row that may be drawn has some weight, and sums of weights up to 1 in float64 tell it from none.
_LEAST = 1e-12


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

    A row's chance is `min(1, c * weight)`, with c such that `count` rows are drawn, and its bias is
    minus the chance's logarithm. So a drawn row stands for those like it that are not, and over many
    draws the sums over the rows in a softmax, numerator and denominator, are the exact ones; rows of
    much weight are certain, and stand for themselves alone. The draw is systematic, without chance:
    rows are laid out by position, each as long as its chance, and those are drawn that cover the
    middle of a unit.

    Arguments and result as `take_best`; indices ascend.

    Source: Madow, "On the Theory of Systematic Sampling, II" (1949); Horvitz and Thompson (1952).
    """
    weights = torch.where(weights < 0, 0.0, weights.clamp(min=_LEAST))
    chances = (weights * _factor(weights, count)).clamp_(max=1)
    ends = chances.cumsum(1, dtype=torch.float64)
    middles = torch.arange(count, dtype=torch.float64).add_(0.5).repeat(len(weights), 1)
    drawn = torch.searchsorted(ends, middles)
    none = drawn == weights.shape[1]
    drawn = drawn.clamp_(max=weights.shape[1] - 1)
    bias = -chances.gather(1, drawn).log()
    return drawn.masked_fill(none, -1), bias.masked_fill(none, -torch.inf)


def _factor(weights: Tensor, count: int) -> Tensor:
    """The factor c with which the chances add up to `count`, float32 `[n_kv_heads, 1]`.

    The rows of most weight are certain, as long as the next one would be drawn more than once if
    the rows left shared the draws left.
    """
    most = weights.topk(min(count, weights.shape[1]), dim=1).values.double()
    # Entry i: the sum of the weights without the i largest, and the draws left for them.
    rest = weights.sum(1, keepdim=True, dtype=torch.float64) - (most.cumsum(1) - most)
    left = count - torch.arange(most.shape[1])
    certain = (most * left >= rest).sum(1, keepdim=True).clamp_(max=most.shape[1] - 1)
    return (left[certain] / rest.gather(1, certain)).float()
