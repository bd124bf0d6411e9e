"""The tree of page ids: which pages are some session's, without a count of each page's sessions.

Sessions that begin with the same tokens begin with the same pages, and the id of a page names all
before it. So all sessions' pages are a tree, and each session is the page that it ends with. A page
counts the sessions that end with it and the pages that follow it. Without any it is dead: no session
has it. Pure: a catalog stores the pages (`Nodes`) and changes them in the transaction of the commit.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

from kvrecall.domain.page_ids import PageId


class Nodes(Protocol):
    """The stored pages of all sessions."""

    def has(self, page: PageId) -> bool:
        """Return whether some session has the page."""
        ...

    def add(self, page: PageId, before: PageId | None) -> None:
        """Add a page that follows `before` (None: a first one) with one reference; it is not dead."""
        ...

    def hold(self, page: PageId) -> None:
        """Add a reference to a page."""
        ...

    def release(self, page: PageId) -> PageId | None:
        """Take a reference from a page. Without any it moves to the dead ones.

        Returns the page before one that is dead now, if there is one.
        """
        ...


def replace(nodes: Nodes, last: PageId | None, pages: Sequence[PageId]) -> PageId | None:
    """Let a session that ended with page `last` (None: without pages) have exactly `pages`, in order.

    Returns the page that it ends with now.
    """
    end = pages[-1] if pages else None
    if end != last:
        _hold(nodes, pages)
        drop(nodes, last)
    return end


def drop(nodes: Nodes, last: PageId | None) -> None:
    """Forget a session that ended with page `last`; pages that no session has are dead."""
    while last is not None:
        last = nodes.release(last)


def _hold(nodes: Nodes, pages: Sequence[PageId]) -> None:
    """Add a session with these pages."""
    # Where a page is known all before it are.
    known = bisect_left(range(len(pages)), True, key=lambda at: not nodes.has(pages[at]))
    before = pages[known - 1] if known else None
    if before is not None:
        nodes.hold(before)
    for parent, page in pairwise([before, *pages[known:]]):
        assert page is not None
        nodes.add(page, parent)
