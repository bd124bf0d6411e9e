"""Reach of a layer that sees the newest tokens alone."""

from dataclasses import dataclass
from typing import overload

from torch import Tensor


@dataclass(frozen=True)
class Window:
    """The last `size` tokens, the query's own included; if `chunked`, those of its chunk of `size`."""

    size: int
    chunked: bool = False

    @overload
    def first_seen(self, position: int) -> int: ...

    @overload
    def first_seen(self, position: Tensor) -> Tensor: ...

    def first_seen(self, position: int | Tensor) -> int | Tensor:
        """Return the first position that a query at `position` sees; it may be negative."""
        if self.chunked:
            return position - position % self.size
        return position - (self.size - 1)

    def describe(self) -> str:
        """Describe the reach in words."""
        return f"{'chunk' if self.chunked else 'window'} of {self.size} tokens"
