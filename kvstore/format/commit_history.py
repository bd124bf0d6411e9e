"""Commit history of a session: the stored rows that may be read as committed ones.

A page's header names the epoch under which the page was written, not whether its rows were ever
committed: a turn may have been given up, and another process may have continued the session with
other rows, in tiers that this process does not see. The history decides it.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

_EPOCH = attrgetter("epoch")
_LENGTH = attrgetter("length")


@dataclass(frozen=True)
class CommitPoint:
    """The fact that `length` tokens of a session were committed when `epoch` ended."""

    epoch: int
    length: int


@dataclass(frozen=True)
class CommitHistory:
    """Committed length of a session by epoch: `points` ascend in epoch and length.

    Epochs between two points committed nothing. A history with fewer points makes fewer rows
    readable, never more.
    """

    points: Sequence[CommitPoint]

    def committed_tokens(self, epoch: int) -> int:
        """Number of leading tokens whose rows are committed ones in pages written under `epoch`."""
        index = bisect_right(self.points, epoch, key=_EPOCH)
        return self.points[index - 1].length if index else 0

    def first_epoch(self, tokens: int) -> int:
        """First epoch whose pages have `tokens` committed tokens; 0 if there is none."""
        index = bisect_left(self.points, tokens, key=_LENGTH)
        return self.points[index].epoch if index < len(self.points) else 0


# The history of pages that were referenced before histories were kept.
ALL_COMMITTED = CommitHistory((CommitPoint(0, 1 << 63),))


def assume_history(epoch: int, length: int) -> CommitHistory:
    """Build the history for an opening under `epoch` that brings none.

    Only pages of the epoch before can be trusted: no other process can have written since.
    """
    return CommitHistory((CommitPoint(max(0, epoch - 1), length),))
