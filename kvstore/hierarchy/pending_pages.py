"""Pages that are not yet flushed to the lowest tier, and the tier that holds each meanwhile."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from threading import Lock

from kvstore.format.page import PageId


@dataclass(frozen=True)
class PendingPage:
    """A page that is not yet in the lowest tier.

    Attributes:
        id: Id of the page.
        depth: Depth of the tier that holds it.
        durable: Whether that tier is durable.
        replace: Whether it replaces what the lowest tier may have, as that may be damaged.
    """

    id: PageId
    depth: int
    durable: bool
    replace: bool = False


class PendingPages:
    """All pages that are not yet flushed to the lowest tier. Safe to call from several threads."""

    def __init__(self) -> None:
        self._pages: dict[PageId, PendingPage] = {}
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, page_id: PageId) -> bool:
        return page_id in self._pages

    def add(self, pending: PendingPage) -> None:
        """Record a page; replaces what was recorded of it."""
        with self._lock:
            self._pages[pending.id] = pending

    def discard(self, ids: Iterable[PageId]) -> None:
        """Remove pages that the lowest tier has, or that are no longer needed."""
        with self._lock:
            for page_id in ids:
                self._pages.pop(page_id, None)

    def get_depth(self, page_id: PageId, default: int) -> int:
        """Return the depth of the tier that holds a page; `default` when the page is not pending."""
        pending = self._pages.get(page_id)
        return default if pending is None else pending.depth

    def select(self, ids: Collection[PageId] | None = None) -> list[PendingPage]:
        """Select those of some pages that are pending, or all."""
        with self._lock:
            if ids is None:
                return list(self._pages.values())
            return [pending for each in ids if (pending := self._pages.get(each)) is not None]
