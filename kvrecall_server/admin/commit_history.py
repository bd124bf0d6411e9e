"""The catalog's commit histories in the row store's form."""

from collections.abc import Sequence

from kvrecall.domain.sessions.commit_points import CommitPoint
from kvrecall.domain.sessions.session import SharedPages
from kvstore.format import commit_history
from kvstore.format.commit_history import CommitHistory


def to_commit_history(points: Sequence[CommitPoint]) -> CommitHistory:
    """Convert the history of a session with rows, or of pages that a session references."""
    if not points:
        return commit_history.ALL_COMMITTED
    return CommitHistory(
        [commit_history.CommitPoint(point.epoch, point.length) for point in points]
    )


def find_writer(
    index: int, session: str, history: CommitHistory, shared: Sequence[SharedPages]
) -> tuple[str, CommitHistory]:
    """Return the session that wrote a page, an ancestor in `shared` or this one, and its commits."""
    for each in shared:
        if index < each.pages:
            return each.owner, to_commit_history(each.history)
    return session, history
