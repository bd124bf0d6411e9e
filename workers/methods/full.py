"""Full cache: no row is evicted."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from workers.methods.base import LayerRows, Method
from workers.primitives.selection import top_per_head


@dataclass(frozen=True)
class Full(Method):
    """Every row; the upper bound in comparisons.

    A session ends when its slot is full.
    """

    name: ClassVar[str] = "full"
    evicts: ClassVar[bool] = False

    def scores(self, rows: LayerRows) -> Tensor:
        """The same score for every row."""
        return torch.zeros_like(rows.positions, dtype=torch.float32)

    def select(self, scores: Tensor, positions: Tensor, budget: int) -> Tensor:
        """Select all rows."""
        return top_per_head(scores, positions, positions.shape[1])
