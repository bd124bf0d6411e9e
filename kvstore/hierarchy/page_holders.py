"""Who holds which pages: a page that an open session has is never deleted."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from threading import Condition

from kvstore.format.page import PageId


class PageHolders:
    """Counts the open sessions that have each page. Safe to call from several threads.

    A deletion takes the pages that nobody holds while it begins. Whoever wants to hold one of these
    waits until it has ended, and then finds out what is left.
    """

    def __init__(self) -> None:
        self._counts = Counter[PageId]()
        self._deleting = frozenset[PageId]()
        self._changed = Condition()

    def hold(self, ids: Collection[PageId]) -> None:
        """Count one more holder of each of these pages, none of which is being deleted then."""
        with self._changed:
            while not self._deleting.isdisjoint(ids):
                self._changed.wait()
            self._counts.update(ids)

    def release(self, ids: Iterable[PageId]) -> None:
        """Count one holder less of each of these pages."""
        with self._changed:
            for page_id in ids:
                self._counts[page_id] -= 1
                if not self._counts[page_id]:
                    del self._counts[page_id]

    @contextmanager
    def held(self, ids: Collection[PageId]) -> Iterator[None]:
        """Hold these pages until the end."""
        self.hold(ids)
        try:
            yield
        finally:
            self.release(ids)

    def select_free(self, ids: Iterable[PageId]) -> list[PageId]:
        """Select those of the pages that nobody holds."""
        with self._changed:
            return [page_id for page_id in ids if page_id not in self._counts]

    @contextmanager
    def deleting(self, ids: Iterable[PageId]) -> Iterator[frozenset[PageId]]:
        """Yield those of the pages that nobody holds, nor can until the end; one thread at a time."""
        with self._changed:
            assert not self._deleting, "one thread deletes"
            self._deleting = free = frozenset(self.select_free(ids))
        try:
            yield free
        finally:
            with self._changed:
                self._deleting = frozenset()
                self._changed.notify_all()
