"""The tree of page ids: which pages are some session's, counted without a count for each page.

Sessions that begin with the same tokens begin with the same pages, and the id of a page names all
before it. So all sessions' pages are a tree. A run is a stretch of it without a branch. It counts the
sessions that end with its last page and the runs that follow it, and goes when there are none. Pure:
a catalog stores the runs (`Runs`) and changes them in the transaction of the commit.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from kvrecall.domain.page_ids import count_common

# The most sessions that a look-up of pages returns.
SESSIONS_FOUND = 16


@dataclass(frozen=True)
class Run:
    """A run: the ids of its pages in order, at least one, and the run before it (None: none).

    `refs`: sessions that end with its last page, and runs that follow it.
    """

    id: int
    parent: int | None
    refs: int
    pages: tuple[bytes, ...]


class Runs(Protocol):
    """The stored runs. No two begin with the same page."""

    def find(self, first: bytes) -> Run | None:
        """Return the run that begins with a page."""
        ...

    def get(self, run_id: int) -> Run:
        """Return a run that exists."""
        ...

    def add(self, parent: int | None, refs: int, pages: Sequence[bytes]) -> int:
        """Add a run under an id that no run has."""
        ...

    def put(self, run: Run) -> None:
        """Replace the run of this id."""
        ...

    def remove(self, run_id: int) -> None:
        """Remove a run."""
        ...


def extend(runs: Runs, leaf: int | None, pages: Sequence[bytes]) -> tuple[int | None, list[bytes]]:
    """Let a session that ended with run `leaf` have exactly `pages`, in order.

    Returns the run that it ends with now (None: without pages), and the pages that are no session's
    any more.
    """
    last, known = find(runs, pages)
    if last is not None:
        last = _end(runs, last, pages[:known])
    if known < len(pages):
        last = _append(runs, last, leaf, pages[known:])
    if last == leaf:
        return leaf, []
    if last is not None:
        _count(runs, last, 1)
    return last, drop(runs, leaf)


def drop(runs: Runs, leaf: int | None) -> list[bytes]:
    """Forget a session that ended with run `leaf`; return the pages that are no session's any more."""
    dead: list[bytes] = []
    while leaf is not None and _count(runs, leaf, -1) == 0:
        run = runs.get(leaf)
        runs.remove(leaf)
        dead = [*run.pages, *dead]
        leaf = run.parent
    return dead


def find(runs: Runs, pages: Sequence[bytes]) -> tuple[int | None, int]:
    """Find the run that has the last known one of these pages, and how many are known."""
    last: int | None = None
    known = 0
    while known < len(pages) and (run := runs.find(pages[known])) is not None:
        last = run.id
        common = count_common(run.pages, pages[known:])
        known += common
        if common < len(run.pages):
            break
    return last, known


def _end(runs: Runs, run_id: int, pages: Sequence[bytes]) -> int:
    """Return the run that ends with the last of `pages`, which run `run_id` has: it or its beginning.

    Of a run that is split the rest keeps the id: sessions that end with it need no change.
    """
    run = runs.get(run_id)
    count = run.pages.index(pages[-1]) + 1
    if count == len(run.pages):
        return run_id
    # First the rest, as no two runs begin with the same page.
    runs.put(replace(run, pages=run.pages[count:]))
    first = runs.add(run.parent, 1, run.pages[:count])
    runs.put(replace(run, parent=first, pages=run.pages[count:]))
    return first


def _append(runs: Runs, last: int | None, leaf: int | None, pages: Sequence[bytes]) -> int:
    """Add pages that are not known behind run `last`; return the run that they are in."""
    if last is not None:
        run = runs.get(last)
        if last == leaf and run.refs == 1:  # the session's own end, with nothing behind it
            runs.put(replace(run, pages=(*run.pages, *pages)))
            return last
        runs.put(replace(run, refs=run.refs + 1))
    return runs.add(last, 0, pages)


def _count(runs: Runs, run_id: int, change: int) -> int:
    """Change a run's number of references; return it."""
    run = runs.get(run_id)
    runs.put(replace(run, refs=run.refs + change))
    return run.refs + change
