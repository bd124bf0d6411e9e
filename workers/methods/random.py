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
        """Random numbers, drawn on the CPU so that a seed gives the same ones on every device.

        Each head has its own: neither which heads a rank has, nor how many rows another head has,
        changes what is drawn.
        """
        heads, n = rows.positions.shape
        first = (rows.seed * 1_000_003 + rows.layer) * 1_009 + heads * rows.group.index
        seeds = [(first + head) % 2**63 for head in range(heads)]
        drawn = [torch.rand(n, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        return torch.stack(drawn).to(rows.positions.device)
