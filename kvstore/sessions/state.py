"""State of one session in the store: its page table and its unfinished page in memory."""

from dataclasses import dataclass, field
from itertools import count
from threading import Lock, RLock

from torch import Tensor

from kvstore.format.page import EPOCH_SHIFT, first_sequence
from kvstore.format.page_table import PageTable


@dataclass(eq=False)
class StoredSession:
    """Mutable state of one session; every read and change happens under `lock`.

    Attributes:
        name: Id of the session.
        table: Versions of the pages that were submitted to the writer.
        epoch: Epoch under which pages are written.
        length: Tokens whose rows the session has.
        tail: Full-size page that token `length` is appended to; None until it is created or read.
        unflushed: Whether the unfinished page differs from the version that was submitted.
        loaded: Whether this state is complete; if not, opening the session must read the tiers.
        truncation_pending: Whether tiers may still have truncated rows, which they must not keep.
        unopened: Whether tiers may hold more than this state says: an earlier process stored the
            session, or it was unloaded, and it was not opened since.
        removed: Whether the session was deleted or released; a caller must look it up again.
    """

    name: str
    table: PageTable
    lock: RLock = field(default_factory=RLock)
    epoch: int = 0
    length: int = 0
    tail: Tensor | None = None
    unflushed: bool = False
    loaded: bool = False
    truncation_pending: bool = False
    unopened: bool = False
    removed: bool = False

    def unload(self) -> None:
        """Forget everything but the epoch: only the tiers say what rows there are."""
        self.table = PageTable(self.name)
        self.length = 0
        self.tail = None
        self.loaded = False
        self.unopened = True

    def valid_tokens(self, index: int, page_tokens: int) -> int:
        """Number of tokens that a page has."""
        return min(page_tokens, self.length - index * page_tokens)


class SequenceNumbers:
    """Generates sequence numbers of page versions: the writer's epoch, then a count.

    Every count is larger than all those seen before. Safe to call from several threads.
    """

    def __init__(self) -> None:
        self._counts = count(1)
        self._lock = Lock()

    def next(self, epoch: int) -> int:
        """Return the sequence number of the next version that is written under `epoch`."""
        with self._lock:
            return first_sequence(epoch) + next(self._counts)

    def advance_past(self, sequence: int) -> None:
        """Make all later counts larger than that of a stored page."""
        with self._lock:
            following = next(self._counts)
            self._counts = count(max(following, 1 + (sequence & ((1 << EPOCH_SHIFT) - 1))))
