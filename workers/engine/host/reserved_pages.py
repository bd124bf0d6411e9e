"""Pages that sessions hold, each once however many do, some of them with the codes of their keys."""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from kvrecall.domain.page_ids import PageId


@dataclass(frozen=True)
class Held:
    """What one session holds: pages, with codes of their keys or without, and bytes of its own beside them."""

    pages: frozenset[PageId] = frozenset()
    coded: bool = False
    own_bytes: int = 0

    def beyond(self, other: "Held") -> "Held":
        """What is held beyond another's pages and codes: nearly nothing, of a session from turn to turn."""
        pages = self.pages - other.pages if self.coded == other.coded else self.pages
        return Held(pages, self.coded)


@dataclass
class ReservedPages:
    """Counts the holders of pages, and of their codes.

    Attributes:
        page_bytes, code_bytes: Of a page, and of its codes.
    """

    page_bytes: int
    code_bytes: int
    _holders: Counter[PageId] = field(default_factory=Counter[PageId])
    _coders: Counter[PageId] = field(default_factory=Counter[PageId])

    def __contains__(self, page: PageId) -> bool:
        return page in self._holders

    @property
    def nbytes(self) -> int:
        """Bytes of all pages and codes."""
        return len(self._holders) * self.page_bytes + len(self._coders) * self.code_bytes

    def copy(self) -> "ReservedPages":
        """Copy the counts."""
        counts = self._holders.copy(), self._coders.copy()
        return ReservedPages(self.page_bytes, self.code_bytes, *counts)

    def count_added(self, held: Held) -> int:
        """Bytes that `add` would add."""
        pages = sum(page not in self._holders for page in held.pages)
        codes = sum(page not in self._coders for page in held.pages) * held.coded
        return pages * self.page_bytes + codes * self.code_bytes

    def add(self, held: Held) -> None:
        """Count a session as a holder."""
        self._holders.update(held.pages)
        if held.coded:
            self._coders.update(held.pages)

    def remove(self, held: Held) -> list[PageId]:
        """Count a session as a holder no more; returns the pages that none holds now."""
        if held.coded:
            _subtract(self._coders, held.pages)
        return _subtract(self._holders, held.pages)


def _subtract(counts: Counter[PageId], pages: Collection[PageId]) -> list[PageId]:
    """Count each page once less; return those that are not counted any more."""
    counts.subtract(pages)
    released = [page for page in pages if counts[page] <= 0]
    for page in released:
        del counts[page]
    return released
