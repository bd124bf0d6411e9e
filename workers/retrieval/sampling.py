"""Choice of the rows that a step retrieves, by their attention weights."""

import torch
from torch import Tensor

from workers.parallel.alone import Alone
from workers.parallel.group import Group

ROTATIONS = 1024
"""Ranks are rotated by less than so many positions, see `Ranks`."""

_GOLDEN = (5**0.5 - 1) / 2
_LEAST = torch.finfo(torch.float32).tiny


class Ranks:
    """Numbers that decide which of two rows of equal weight is drawn: one for each position.

    They are the reciprocals of a golden ratio sequence, which is spread evenly over (0, 1) in any
    stretch of positions. A rotation of the positions is another such sequence: each KV head, layer
    and token has its own, so that no row is always out of luck.
    """

    def __init__(self, group: Group = Alone()) -> None:
        """group: of the processes that have the other heads, each of which has ranks of its own."""
        self._values = torch.empty(0)
        self._group = group

    def rotated(self, heads: int, n: int, rotation: int) -> Tensor:
        """Return the ranks of positions 0 to n - 1, a view, float32 `[heads, n]`, 1 or more."""
        stride = ROTATIONS // (heads * self._group.count)
        first = rotation % ROTATIONS + self._group.index * heads * stride
        return self.unrotated(n).as_strided((heads, n), (stride, 1), first)

    def unrotated(self, n: int) -> Tensor:
        """Return the ranks of positions 0 to n - 1, and of two rotations more at least, float32 `[m]`.

        With `rotated`, head h begins at `rotation % ROTATIONS + h * (ROTATIONS // heads)` of them, where all
        processes' heads are counted.
        """
        needed = n + 2 * ROTATIONS
        if len(self._values) < needed:
            # Ahead of the rows that answers add.
            places = torch.arange(needed + ROTATIONS, dtype=torch.float64)
            self._values = (places * _GOLDEN + 0.5).frac().reciprocal().float()
        return self._values


def take_best(weights: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Take each head's rows of most weight.

    weights: float32 `[n_kv_heads, n]`, negative where a row may not be taken. Returns indices, int64
    `[n_kv_heads, min(count, n)]`, the best first, -1 for none, and as bias 0, or -inf for none.
    """
    best = weights.topk(min(count, weights.shape[1]), dim=1)
    none = best.values < 0
    bias = torch.zeros_like(best.values).masked_fill_(none, -torch.inf)
    return best.indices.masked_fill(none, -1), bias


def draw(weights: Tensor, ranks: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Draw each head's rows in proportion to their weights, no row twice.

    Priority sampling: the `count` rows with the largest product of weight and rank are drawn. With t
    as the next product a row of weight w is drawn with chance `min(1, w / t)`. Rows of chance 1 stand
    for themselves alone; the others stand in equal shares for the weight of all rows that are not
    certain, so that the drawn rows' sum in a softmax's denominator is the exact one, and over many
    draws that in its numerator. One of the drawn rows at least is not certain.

    Arguments and result as `take_best`, of more than `count` weights a head; ranks: float32 of their
    shape. Rows without weight are none.

    Source: Duffield, Lund and Thorup, "Priority sampling for estimation of arbitrary subset sums"
    (2007); for the shares Hajek, "Comment on an essay on the logical foundations of survey sampling"
    (1971).
    """
    most = (weights * ranks).topk(count + 1, dim=1)
    drawn = most.indices[:, :count]
    threshold = most.values[:, -1:].clamp(min=_LEAST)
    kept = weights.gather(1, drawn)
    certain = kept >= threshold
    rest = weights.masked_fill(weights >= threshold, 0.0).clamp_(min=0).sum(1, keepdim=True)
    rest += (kept * certain)[:, -1:]
    certain[:, -1] = False
    none = kept <= 0
    share = rest / (count - (certain | none).sum(1, keepdim=True))
    bias = (share / kept).log_().masked_fill_(certain, 0.0)
    return drawn.masked_fill(none, -1), bias.masked_fill_(none, -torch.inf)
