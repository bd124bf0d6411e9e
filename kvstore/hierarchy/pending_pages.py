"""Pages that the lowest tier did not take when they were written: where they are meanwhile."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from threading import Lock

from kvstore.format.page import PageKey
from kvstore.format.page_table import ExpectedPage


@dataclass(frozen=True)
class PendingPage:
    """A page that the lowest tier is to get yet. `depth`: of the tier that has it; `epoch`: its writer's."""

    page: ExpectedPage
    depth: int
    durable: bool
    epoch: int | None


class PendingPages:
    """What the lowest tier is to get yet. Safe to use from several threads."""

    def __init__(self) -> None:
        self._owed: dict[PageKey, PendingPage] = {}
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._owed)

    def __contains__(self, key: PageKey) -> bool:
        return key in self._owed

    def add(self, owed: PendingPage) -> None:
        """The lowest tier did not take a page; it replaces an earlier version."""
        with self._lock:
            self._owed[owed.page.key] = owed

    def discard(self, keys: Sequence[PageKey]) -> None:
        """These pages are owed no more: the lowest tier has them, or nobody wants them."""
        with self._lock:
            for key in keys:
                self._owed.pop(key, None)

    def depth(self, key: PageKey, otherwise: int) -> int:
        """Where a page is that is owed; `otherwise` if it is not."""
        owed = self._owed.get(key)
        return otherwise if owed is None else owed.depth

    def of(self, sessions: Collection[str] | None = None) -> list[PendingPage]:
        """What is owed of some sessions' pages, or of all."""
        with self._lock:
            return [
                owed
                for key, owed in self._owed.items()
                if sessions is None or key.session in sessions
            ]
