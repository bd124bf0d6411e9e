"""Oldest: the opposite of a sliding window."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from workers.methods.base import LayerRows, Method


@dataclass(frozen=True)
class Oldest(Method):
    """The oldest rows: once the session is full, only new rows are evicted; a baseline."""

    name: ClassVar[str] = "oldest"

    def scores(self, rows: LayerRows) -> Tensor:
        """Higher scores for earlier positions."""
        return -rows.positions.float()
