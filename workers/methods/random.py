"""Random: the floor that a method must beat."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import ConfigDict
from torch import Tensor

from workers.methods.base import LayerRows
from workers.selection import top_per_head


@dataclass(frozen=True)
class Random:
    """Uniformly random rows per head, the same ones whenever the session's seed and history are the same."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    name: ClassVar[str] = "random"
    evicts: ClassVar[bool] = True

    @property
    def observes(self) -> int:
        """Nothing."""
        return 0

    def scores(self, rows: LayerRows) -> Tensor:
        """Random numbers, drawn on the CPU so that a seed means the same on every device."""
        generator = torch.Generator().manual_seed((rows.seed * 1_000_003 + rows.layer) % 2**63)
        return torch.rand(rows.positions.shape, generator=generator).to(rows.positions.device)

    def select(self, scores: Tensor, rows: LayerRows, budget: int) -> Tensor:
        """The best per head."""
        return top_per_head(scores, rows.positions, budget)
