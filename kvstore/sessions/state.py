"""State of one open session in the store: its pages and the rows behind them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from threading import RLock

from torch import Tensor

from kvstore.errors import MissingPageError
from kvstore.format.page import NO_KEY, PageId


@dataclass(eq=False)
class StoredSession:
    """Mutable state of one session; every read and change happens under `lock`.

    Attributes:
        name: Id of the session.
        pages: Ids of the pages that were submitted to the writer or are stored, in order.
        key_id: Id of the key that its pages are encrypted with.
        length: Tokens whose rows the session has.
        behind: Full-size pages of the rows behind `pages`, in memory alone; the last one may have room.
        missing: Those of `pages` that were not found.
        unflushed: Those of `pages` that are not known to be durable, with a number for each time that
            one was submitted.
        submissions: The last of these numbers.
        kept_at: Monotonic seconds when the pages' time to live was restarted last.
        removed: Whether the session was closed; a caller must look it up again.
    """

    name: str
    pages: list[PageId] = field(default_factory=list)
    lock: RLock = field(default_factory=RLock)
    key_id: bytes = NO_KEY
    length: int = 0
    behind: list[Tensor] = field(default_factory=list)
    missing: set[PageId] = field(default_factory=set)
    unflushed: dict[PageId, int] = field(default_factory=dict)
    submissions: int = 0
    kept_at: float = 0.0
    removed: bool = False

    def mark_unflushed(self, page_id: PageId) -> None:
        """Record that a page was submitted: what is flushed already does not cover it."""
        self.submissions += 1
        self.unflushed[page_id] = self.submissions

    def mark_flushed(self, flushed: Mapping[PageId, int]) -> None:
        """Record that pages are durable, but for those that were submitted again since."""
        for page_id, number in flushed.items():
            if self.unflushed.get(page_id) == number:
                del self.unflushed[page_id]

    def expect(self, indices: Sequence[int]) -> list[PageId]:
        """Return ids of pages by index. Raises MissingPageError for one that was not found."""
        for index in indices:
            if self.pages[index] in self.missing:
                raise MissingPageError(
                    f"page {index} of session {self.name!r} was not found; its rows must be "
                    "computed again"
                )
        return [self.pages[index] for index in indices]

    def list_missing(self) -> list[int]:
        """Indices of the pages that were not found."""
        return [index for index, page_id in enumerate(self.pages) if page_id in self.missing]

    def keep(self, pages: int, length: int) -> list[PageId]:
        """Go on with the first `pages` pages and `length` rows; return the ids of the others."""
        dropped = self.pages[pages:]
        del self.pages[pages:]
        self.missing.difference_update(dropped)
        for page_id in dropped:
            self.unflushed.pop(page_id, None)
        self.behind = []
        self.length = length
        return dropped
