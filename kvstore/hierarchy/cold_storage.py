"""Cold storage: pages that were not used for a while lie in a bucket, behind the lowest tier.

A thread moves them: a page is stored in the bucket first, and deleted from the lowest tier then, so a
reader that comes from above always meets it. A page that is read from the bucket is copied back into the
lowest tier, and stays in the bucket as well: moving it again takes no transfer.

The thread alone writes to the bucket and deletes there. So turns never wait for the bucket, unless they
read what lies only there.
"""

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from threading import Event, Lock, Thread

from kvstore.errors import PageError, StoreClosedError, TierError, TierFullError
from kvstore.format.page import Blob, PageId
from kvstore.hierarchy.last_use import LastUse
from kvstore.hierarchy.metered import MeteredTiers

# Between two lists of the bucket: other workers store and delete pages too.
_LIST_SECONDS = 600.0
# Between two searches for pages to move, which visit all pages of the lowest tier.
_SEARCH_SECONDS = 600.0
# Between two looks whether something of this is due, or a bucket that failed answers again.
_LOOK_SECONDS = 5.0
# Pages that are in memory at a time while they are moved.
_PAGES_AT_ONCE = 16


class ColdStorage:
    """Knows which pages lie in the bucket, and runs the thread that moves and deletes them.

    A store without a bucket has one that knows no page and does nothing. Safe to call from several threads.
    """

    def __init__(self, tiers: MeteredTiers, after_seconds: float) -> None:
        self._tiers = tiers
        self._bucket = tiers.bucket
        self._after_seconds = after_seconds
        self._uses = LastUse()
        self._delete_moved: Callable[[Collection[PageId]], None] = lambda ids: None
        # Pages that are to be deleted from the bucket, or stored there anew.
        self._condemned: set[PageId] = set()
        self._lock = Lock()
        self._wanted = Event()
        self._closing = Event()
        self._listed_at = self._searched_at = float("-inf")
        self._thread = Thread(target=self._run, name="kvstore-cold-storage", daemon=True)

    def start(self, delete_moved: Callable[[Collection[PageId]], None]) -> None:
        """Start the thread. `delete_moved` has `confirm_moved` called on the thread that writes pages."""
        if self._bucket is not None:
            self._delete_moved = delete_moved
            self._thread.start()

    def touch(self, ids: Iterable[PageId]) -> None:
        """Record that pages are used now: they stay where they are for a while."""
        if self._bucket is not None:
            self._uses.touch(ids)

    def knows(self, page_id: PageId) -> bool:
        """Return whether the bucket has a page, as far as it is known without asking."""
        return (
            self._bucket is not None
            and self._bucket.knows(page_id)
            and page_id not in self._condemned
        )

    def find(self, ids: Sequence[PageId]) -> set[PageId]:
        """Find those of the pages that the bucket has, asking for those that are not known.

        Raises the bucket's error when it does not answer and was never listed.
        """
        if self._bucket is None or not ids:
            return set()
        has = self._tiers.contains(self._tiers.cold, ids)
        found = {page_id for page_id, is_here in zip(ids, has, strict=True) if is_here}
        return found - self._condemned

    def condemn(self, ids: Iterable[PageId]) -> None:
        """Have pages deleted from the bucket, soon: they are dead, or what is there may be damaged."""
        if self._bucket is None:
            return
        with self._lock:
            # Unknown ones too: one may be on its way.
            self._condemned.update(ids)
        self._wanted.set()

    def list_ids(self, written_before: int) -> list[PageId]:
        """Ids of the bucket's pages that were written before a time in unix seconds.

        Empty until the bucket was listed for the first time.
        """
        if self._bucket is None or not self._bucket.is_listed:
            return []
        listed = self._bucket.list_ids(written_before)
        return [page_id for page_id in listed if page_id not in self._condemned]

    def confirm_moved(self, ids: Iterable[PageId]) -> list[PageId]:
        """Select the moved pages that the lowest tier no longer needs.

        Called on the thread that writes and deletes pages: none of them is written or deleted meanwhile.
        """
        moved = [page_id for page_id in ids if self.knows(page_id)]
        return self._uses.select_idle(moved, self._after_seconds)

    def close(self) -> None:
        """Stop after the requests that are running, and delete what is left to delete. May be called twice."""
        self._closing.set()
        self._wanted.set()
        if self._thread.is_alive():
            self._thread.join()

    # The thread

    def _run(self) -> None:
        while not self._closing.is_set():
            self._wanted.clear()
            try:
                self._probe()
                self._delete_condemned()
                self._list()
                self._search()
            except (
                Exception
            ):  # The thread must survive. Pages are where they were; the meter has the reason.
                self._closing.wait(_LOOK_SECONDS)
            else:
                self._wanted.wait(min(_LOOK_SECONDS, self._after_seconds / 8))
        with suppress(TierError, StoreClosedError):  # A sweep finds what is left.
            self._delete_condemned()

    def _probe(self) -> None:
        """Find out whether a bucket that failed answers again, before anything else is done for it."""
        assert self._bucket is not None, "the thread runs only with a bucket"
        if self._bucket.has_failed or self._bucket.name in self._tiers.failures():
            with self._tiers.watched_cold():
                self._bucket.probe()

    def _delete_condemned(self) -> None:
        """Delete from the bucket what is condemned and there."""
        assert self._bucket is not None, "the thread runs only with a bucket"
        with self._lock:
            ids = frozenset(self._condemned)
        there = [id for id in ids if not self._bucket.is_listed or self._bucket.has_object(id)]
        if there:
            self._tiers.delete(self._tiers.cold, there)
        with self._lock:
            # None was stored since: this thread alone does.
            self._condemned -= ids

    def _list(self) -> None:
        """List the bucket if that is due."""
        assert self._bucket is not None, "the thread runs only with a bucket"
        if time.monotonic() - self._listed_at >= _LIST_SECONDS:
            with self._tiers.watched_cold():
                self._bucket.refresh()
            self._listed_at = time.monotonic()

    def _search(self) -> None:
        """Move the pages of the lowest tier that were not used for a while."""
        if time.monotonic() - self._searched_at < min(_SEARCH_SECONDS, self._after_seconds / 8):
            return
        written_before = int(time.time() - self._after_seconds) + 1
        ids = self._uses.select_idle(
            self._tiers.lowest.list_ids(written_before), self._after_seconds
        )
        for first in range(0, len(ids), _PAGES_AT_ONCE):
            if self._closing.is_set():
                return
            self._delete_condemned()
            try:
                self._move(ids[first : first + _PAGES_AT_ONCE])
            except TierFullError:
                break  # What does not fit stays.
        self._uses.forget(self._after_seconds)
        self._searched_at = time.monotonic()

    def _move(self, ids: Sequence[PageId]) -> None:
        """Store pages in the bucket that it does not have, and have the lowest tier's copies deleted."""
        assert self._bucket is not None, "the thread runs only with a bucket"
        known = [page_id for page_id in ids if self.knows(page_id)]
        # Asked again: another worker may have deleted some, which were dead for a while.
        there = dict(zip(known, self._bucket.look_for(known), strict=True))
        new = [page_id for page_id in ids if not there.get(page_id)]
        pages = self._read(new)
        self._tiers.put_all(self._tiers.cold, pages)
        self._delete_moved([page_id for page_id in ids if self.knows(page_id)])

    def _read(self, ids: Sequence[PageId]) -> list[tuple[PageId, Blob]]:
        """Read pages from the lowest tier as they are; without those that are gone or damaged."""
        try:
            blobs = self._tiers.get(self._tiers.bottom, ids)
        except PageError:
            if len(ids) == 1:
                return []  # A session that has it finds out, and has it written again.
            return [page for page_id in ids for page in self._read([page_id])]
        return [(id, blob) for id, blob in zip(ids, blobs, strict=True) if blob is not None]
