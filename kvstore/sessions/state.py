"""One session's rows as its store sees them: pages that were handed over, and the unfinished page in memory."""

from dataclasses import dataclass, field
from itertools import count
from threading import Lock, RLock

from torch import Tensor

from kvstore.format.page import EPOCH_SHIFT, first_sequence
from kvstore.format.page_table import PageTable


@dataclass(eq=False)
class StoredSession:
    """The state of one session. Whoever reads or changes it holds `lock`."""

    name: str
    table: PageTable
    lock: RLock = field(default_factory=RLock)
    epoch: int = 0
    """Under which pages are written."""
    length: int = 0
    tail: Tensor | None = None
    """The page that token `length` will go to, full size; None when it must be made or read first."""
    unflushed: bool = False
    """Whether the unfinished page differs from the version that was handed over."""
    known: bool = False
    """Whether all this is what the session has; if not, only opening it can tell."""
    cut_due: bool = False
    """Whether tiers may still have rows that were cut off, and must not keep them."""
    left: bool = False
    """Whether tiers may hold more of it than this says: an earlier process left it, and nobody has opened it yet."""
    dropped: bool = False

    def filled(self, index: int, page_tokens: int) -> int:
        """How many tokens the page has."""
        return min(page_tokens, self.length - index * page_tokens)


class SequenceNumbers:
    """Numbers page versions: the writer's epoch, then a count. Each is larger than all that were seen before."""

    def __init__(self) -> None:
        self._counts = count(1)
        self._lock = Lock()

    def next(self, epoch: int) -> int:
        """The number of the next version that is written under `epoch`."""
        with self._lock:
            return first_sequence(epoch) + next(self._counts)

    def seen(self, sequence: int) -> None:
        """A page has this number already."""
        with self._lock:
            following = next(self._counts)
            self._counts = count(max(following, 1 + (sequence & ((1 << EPOCH_SHIFT) - 1))))
