"""Full cache: nothing leaves."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from workers.methods.base import LayerRows, Method
from workers.primitives.selection import top_per_head


@dataclass(frozen=True)
class Full(Method):
    """Keep every row. The ceiling that every other method is compared with; a session ends where its slot ends."""

    name: ClassVar[str] = "full"
    evicts: ClassVar[bool] = False

    def scores(self, rows: LayerRows) -> Tensor:
        """Every row is worth the same."""
        return torch.zeros_like(rows.positions, dtype=torch.float32)

    def select(self, scores: Tensor, positions: Tensor, budget: int) -> Tensor:
        """All of them."""
        return top_per_head(scores, positions, positions.shape[1])
