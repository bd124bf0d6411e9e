"""Pages that are not yet flushed to the lowest tier, and the tier that holds each meanwhile."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from threading import Lock

from kvstore.format.page import PageKey
from kvstore.format.page_table import ExpectedPage


@dataclass(frozen=True)
class PendingPage:
    """A page that is not yet in the lowest tier.

    `depth` and `durable` describe the tier that holds it, `epoch` is the epoch of its writer.
    """

    page: ExpectedPage
    depth: int
    durable: bool
    epoch: int | None


class PendingPages:
    """All pages that are not yet flushed to the lowest tier. Safe to call from several threads."""

    def __init__(self) -> None:
        self._pages: dict[PageKey, PendingPage] = {}
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, key: PageKey) -> bool:
        return key in self._pages

    def add(self, pending: PendingPage) -> None:
        """Record a page; replaces an earlier version of it."""
        with self._lock:
            self._pages[pending.page.key] = pending

    def discard(self, keys: Sequence[PageKey]) -> None:
        """Remove pages that the lowest tier has, or that are no longer needed."""
        with self._lock:
            for key in keys:
                self._pages.pop(key, None)

    def get_depth(self, key: PageKey, default: int) -> int:
        """Depth of the tier that holds a pending page; `default` when the page is not pending."""
        pending = self._pages.get(key)
        return default if pending is None else pending.depth

    def select(self, sessions: Collection[str] | None = None) -> list[PendingPage]:
        """Pending pages of some sessions, or of all."""
        with self._lock:
            return [
                pending
                for key, pending in self._pages.items()
                if sessions is None or key.session in sessions
            ]
