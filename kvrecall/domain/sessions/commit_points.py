"""Commit history of a session: its committed length at the end of each epoch.

A worker's stored pages carry the epoch under which they were written. From the history follows
which of their rows were ever committed, so that a worker without a tier in common with the others
never takes rows of a given-up turn for those that another worker committed in their place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nlargest

# Points of one history that a worker is given.
MAX_COMMIT_POINTS = 256


@dataclass(frozen=True)
class CommitPoint:
    """The fact that `length` tokens of a session were committed when `epoch` ended."""

    epoch: int
    length: int


def limit_points(points: Sequence[CommitPoint]) -> tuple[CommitPoint, ...]:
    """Leave out the points that matter least until MAX_COMMIT_POINTS are left; the last one stays.

    Without a point, the pages of its epoch count as committed only up to the point before: some of
    them may be computed again, but none is believed that should not be.
    """
    if len(points) <= MAX_COMMIT_POINTS:
        return tuple(points)

    def added(index: int) -> int:
        return points[index].length - (points[index - 1].length if index else 0)

    last = len(points) - 1
    kept = nlargest(MAX_COMMIT_POINTS - 1, range(last), key=added)
    return tuple(points[index] for index in [*sorted(kept), last])


def cut_points(points: Sequence[CommitPoint], tokens: int) -> tuple[CommitPoint, ...]:
    """Return the part of a history that concerns the first `tokens` tokens."""
    cut = list[CommitPoint]()
    for point in points:
        cut.append(CommitPoint(point.epoch, min(point.length, tokens)))
        if point.length >= tokens:
            break
    return limit_points(cut)
