"""When pages were used last, as far as this process has seen it."""

import time
from collections.abc import Iterable
from threading import Lock

from kvstore.format.page import PageId


class LastUse:
    """Times of the last use of pages. Safe to call from several threads.

    Uses before the process started are not known: for a page without a known use its time of writing counts.
    """

    def __init__(self) -> None:
        self._times: dict[PageId, float] = {}
        self._lock = Lock()

    def touch(self, ids: Iterable[PageId]) -> None:
        """Record that pages are used now."""
        now = time.monotonic()
        with self._lock:
            self._times.update(dict.fromkeys(ids, now))

    def select_idle(self, ids: Iterable[PageId], seconds: float) -> list[PageId]:
        """Select those of the pages that were not used within so many seconds."""
        used_after = time.monotonic() - seconds
        return [page_id for page_id in ids if self._times.get(page_id, used_after) <= used_after]

    def forget(self, seconds: float) -> None:
        """Forget uses that are so many seconds ago: they decide nothing any more."""
        used_after = time.monotonic() - seconds
        with self._lock:
            self._times = {id: at for id, at in self._times.items() if at > used_after}
