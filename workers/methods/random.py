"""Random: the lower bound in comparisons."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from workers.methods.base import LayerRows, Method


@dataclass(frozen=True)
class Random(Method):
    """Uniformly random rows per head; the lower bound in comparisons.

    They are drawn anew at each eviction, so a row's chance to be active falls with its age: in the
    end this is no uniform sample of the history. They are reproducible from the session's seed and
    history.
    """

    name: ClassVar[str] = "random"

    def scores(self, rows: LayerRows) -> Tensor:
        """Random numbers, drawn on the CPU so that a seed gives the same ones on every device."""
        generator = torch.Generator().manual_seed((rows.seed * 1_000_003 + rows.layer) % 2**63)
        heads, n = rows.positions.shape
        drawn = torch.rand(heads * rows.group.count, n, generator=generator)
        return drawn[heads * rows.group.index :][:heads].to(rows.positions.device)
