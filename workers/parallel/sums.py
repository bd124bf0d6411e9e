"""Sums of tokens' values over the ranks of a group, which may have values of different tokens.

In float64, where sums of float32 numbers of about one size are exact: in whatever order heads are added
up, and however they are divided between ranks, equal sums stay equal, and ties are ties.
"""

import torch
from torch import Tensor

from workers.parallel.group import Group


def sum_by_token(group: Group, tokens: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Sum values of tokens over the ranks.

    tokens: distinct, int `[k]`, ascending; values: float64 `[m, k]`. Returns the tokens that some
    rank has, ascending, and their sums.
    """
    if group.count == 1:
        return tokens, values
    parts = group.gather((tokens.cpu(), values.cpu()))
    known, index = torch.unique(torch.cat([part for part, _ in parts]), return_inverse=True)
    total = torch.zeros(len(values), len(known), dtype=torch.float64)
    total.index_add_(1, index, torch.cat([part for _, part in parts], 1))
    return known.to(tokens.device), total.to(values.device)


def sum_own(group: Group, tokens: Tensor, values: Tensor) -> Tensor:
    """Sum values as `sum_by_token`; returns those of this rank's tokens, float64 `[m, k]`."""
    known, total = sum_by_token(group, tokens, values)
    return total[:, torch.searchsorted(known, tokens)]
