"""Group of the processes of one worker, as far as the rest of the worker calls it."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

from torch import Tensor

_T = TypeVar("_T")


class Group(Protocol):
    """The ranks of one worker, each of which has some of the model's heads, in their order.

    All ranks call its methods in the same order, each on the thread that computes: every call waits
    for all of them. Where a rank's step has failed meanwhile the others' calls in it raise PeerFailed:
    `end` says why. Where a rank is gone they raise GroupLost.
    """

    @property
    def count(self) -> int:
        """Number of ranks."""

    @property
    def index(self) -> int:
        """This rank's number; rank 0 leads."""

    @property
    def local(self) -> int:
        """Number of ranks on this machine."""

    @property
    def beat_seconds(self) -> float | None:
        """Most seconds without a decision of rank 0; None: nobody waits for one."""

    def meet(self) -> None:
        """Wait until all ranks are here, however long they take to load."""

    def gather(self, value: _T) -> list[_T]:
        """Gather the ranks' values, which are small; in the order of the ranks, on each of them."""

    def lead(self, value: _T) -> _T:
        """Return rank 0's value, which is small."""

    def some(self, flags: Sequence[bool]) -> list[bool]:
        """Return for each flag whether it is set on some rank."""

    def mean(self, values: Tensor) -> Tensor:
        """Mean of the ranks' tensors, of one shape; the same bits on all ranks."""

    def any(self, mask: Tensor) -> Tensor:
        """Elementwise OR of the ranks' masks, bool of one shape."""

    def agree(self, error: Exception | None) -> Exception | None:
        """Find out whether something that each rank has done has failed on one, within a step.

        Returns the error of the first rank that has one.
        """

    def next_step(self) -> None:
        """Begin the next of several steps that end together."""

    def end(self, errors: Sequence[Exception | None]) -> list[Exception | None]:
        """End steps, each of which an error may have ended on this rank; None: it went well.

        Returns of each step the error of the first rank that has one: it has failed on all of them.
        """
