"""Oldest: the opposite of a sliding window."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from workers.methods.base import LayerRows, Method


@dataclass(frozen=True)
class Oldest(Method):
    """The rows that came first: what a session holds once it is full, it never gives up for anything new."""

    name: ClassVar[str] = "oldest"

    def scores(self, rows: LayerRows) -> Tensor:
        """The earlier the better."""
        return -rows.positions.float()
