"""Index of a bucket: which pages it has, as of the last listing and what this process did since."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import Lock

from kvstore.errors import InvariantError
from kvstore.format.page import PageId
from kvstore.tiers.base import was_written_before

# Bits of a packed entry: time, size.
_SIZE_BITS = 32


class BucketIndex:
    """Ids, sizes and times of a bucket's pages. Safe to call from several threads.

    It answers without a request. Other processes add and delete pages too, so it may be wrong until
    the next listing. An entry takes about 150 bytes of memory.
    """

    def __init__(self) -> None:
        self.used_bytes = 0
        self.is_listed = False
        self._pages: dict[PageId, int] = {}
        self._damaged: set[PageId] = set()
        self._lock = Lock()
        # What this process changed while the bucket is being listed; None while it is not.
        self._changed: set[PageId] | None = None

    def add(self, page_id: PageId, size: int, written_at: int) -> None:
        """Add an intact page of `size` bytes, written at a time in unix seconds."""
        with self._lock:
            self._set(page_id, size, written_at)
            self._damaged.discard(page_id)
            self._note(page_id)

    def remove(self, ids: Iterable[PageId]) -> None:
        """Remove pages that the bucket does not have; unknown ids are ignored."""
        with self._lock:
            for page_id in ids:
                self._pop(page_id)
                self._note(page_id)

    def mark_damaged(self, page_id: PageId) -> None:
        """Record that a page was found damaged: it is not intact until it is added again."""
        with self._lock:
            self._damaged.add(page_id)

    def has(self, page_id: PageId) -> bool:
        """Return whether the bucket has a page that was not found damaged."""
        return page_id in self._pages and page_id not in self._damaged

    def is_damaged(self, page_id: PageId) -> bool:
        """Return whether a page was found damaged."""
        return page_id in self._damaged

    def get_size(self, page_id: PageId) -> int:
        """Bytes of a page, damaged or not; 0 for one that is not there."""
        return self._pages.get(page_id, 0) & ((1 << _SIZE_BITS) - 1)

    def list_ids(self, written_before: int) -> list[PageId]:
        """Ids of the pages that `was_written_before` a time in unix seconds."""
        with self._lock:
            pages = list(self._pages.items())
        return [
            page_id
            for page_id, packed in pages
            if was_written_before(packed >> _SIZE_BITS, written_before)
        ]

    @contextmanager
    def listing(self) -> Iterator[dict[PageId, tuple[int, int]]]:
        """Collect size and time of every page of the bucket; at the end they are what the index has.

        What this process changes meanwhile stays as it is then. One thread lists at a time. An error
        within changes nothing.
        """
        with self._lock:
            self._changed = set()
        found = dict[PageId, tuple[int, int]]()
        try:
            yield found
            with self._lock:
                self._replace(found)
        finally:
            with self._lock:
                self._changed = None

    def check(self) -> None:
        """Raise InvariantError when the sum of bytes is not that of the entries."""
        with self._lock:
            total = sum(packed & ((1 << _SIZE_BITS) - 1) for packed in self._pages.values())
        if total != self.used_bytes:
            raise InvariantError(
                f"a bucket's pages have {total} bytes, but {self.used_bytes} count"
            )

    def _replace(self, found: dict[PageId, tuple[int, int]]) -> None:
        changed = self._changed or set()
        for page_id in [each for each in self._pages if each not in found]:
            if page_id not in changed:
                self._pop(page_id)
        for page_id, (size, stored_at) in found.items():
            # Of a known page the time of writing is known, which is before that of storing.
            if page_id not in changed and self.get_size(page_id) != size:
                self._set(page_id, size, stored_at)
        self.is_listed = True

    def _set(self, page_id: PageId, size: int, written_at: int) -> None:
        self.used_bytes += size - self.get_size(page_id)
        self._pages[page_id] = written_at << _SIZE_BITS | size

    def _pop(self, page_id: PageId) -> None:
        self.used_bytes -= self.get_size(page_id)
        self._pages.pop(page_id, None)
        self._damaged.discard(page_id)

    def _note(self, page_id: PageId) -> None:
        if self._changed is not None:
            self._changed.add(page_id)
