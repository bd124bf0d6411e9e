"""The catalog's commit histories in the row store's form."""

from collections.abc import Sequence

from kvrecall.domain.commit_points import CommitPoint
from kvstore.format import commit_history


def to_commit_history(points: Sequence[CommitPoint]) -> commit_history.CommitHistory:
    """Convert the history of a session with rows, or of pages that a session references."""
    if not points:
        return commit_history.ALL_COMMITTED
    return commit_history.CommitHistory(
        [commit_history.CommitPoint(point.epoch, point.length) for point in points]
    )
