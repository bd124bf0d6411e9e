"""Rows that a session has, and all that were ever written: it may have dropped pages in between.

Dropped pages stay stored, under numbers that are not used again (`kvstore.format.page_table`). So the
number of written rows only grows. Page ids, recurrent states and commits count by it, and are only added.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvrecall.protocol.v1 import worker_pb2 as pb
from kvstore.format.page_table import add_dropped, skip_dropped

if TYPE_CHECKING:  # checks of a stopped service's files need the numbers alone
    from workers.engine.session import WorkerSession


def count_written(length: int, dropped: Sequence[range], page_tokens: int) -> int:
    """Count the rows that were written when a session has `length` rows, dropped ones included."""
    return length + sum(map(len, dropped)) * page_tokens


def place_state(length: int, dropped: Sequence[range], page_tokens: int) -> int:
    """Count the rows that were written before the recurrent state after `length` rows, whole pages."""
    if not length:
        return 0
    return (skip_dropped(length // page_tokens - 1, dropped) + 1) * page_tokens


def find_live(positions: Sequence[int], dropped: Sequence[range], page_tokens: int) -> list[int]:
    """Find the states that a session still has; returns the rows before each of them."""
    live = list[int]()
    for position in positions:
        pages = position // page_tokens
        if not pages or any(pages - 1 in gap for gap in dropped):
            continue
        live.append((pages - sum(len(gap) for gap in dropped if gap.stop < pages)) * page_tokens)
    return live


def drop_pages(
    dropped: Sequence[range], kept: int, rows: int, page_tokens: int
) -> tuple[range, ...]:
    """Add to the dropped pages those of a session of `rows` rows behind its first `kept`."""
    start = skip_dropped(kept // page_tokens, dropped)
    return add_dropped(dropped, start, rows // page_tokens + sum(map(len, dropped)))


def get_last_id(session: "WorkerSession") -> bytes | None:
    """Return the id of the session's last page; None without one."""
    named = len(session.page_ids) - sum(map(len, session.dropped))
    return session.page_ids[skip_dropped(named - 1, session.dropped)] if named else None


def read_dropped(state: pb.SessionState) -> tuple[range, ...]:
    """Read the pages that a committed session has dropped."""
    return tuple(range(gap.start, gap.stop) for gap in state.dropped)
