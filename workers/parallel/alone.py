"""Group of a worker that is one process: nothing is exchanged."""

from collections.abc import Sequence
from typing import TypeVar

from torch import Tensor

_T = TypeVar("_T")


class Alone:
    """The null object of `Group`: every method returns what it is given."""

    count = 1
    index = 0
    local = 1
    beat_seconds = None

    def meet(self) -> None:
        """Do nothing."""

    def gather(self, value: _T) -> list[_T]:
        """Return the value alone."""
        return [value]

    def lead(self, value: _T) -> _T:
        """Return the value."""
        return value

    def some(self, flags: Sequence[bool]) -> list[bool]:
        """Return the flags."""
        return list(flags)

    def mean(self, values: Tensor) -> Tensor:
        """Return the values."""
        return values

    def any(self, mask: Tensor) -> Tensor:
        """Return the mask."""
        return mask

    def agree(self, error: Exception | None) -> Exception | None:
        """Return the error."""
        return error

    def next_step(self) -> None:
        """Do nothing."""

    def end(self, errors: Sequence[Exception | None]) -> list[Exception | None]:
        """Return the errors."""
        return list(errors)
