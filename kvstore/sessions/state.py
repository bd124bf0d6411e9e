"""State of one session in the store: its page table and the rows behind its pages."""

from dataclasses import dataclass, field
from threading import RLock

from torch import Tensor

from kvstore.errors import StaleWriterError
from kvstore.format.page import first_sequence, get_epoch
from kvstore.format.page_table import PageTable


@dataclass(eq=False)
class StoredSession:
    """Mutable state of one session; every read and change happens under `lock`.

    Attributes:
        name: Id of the session.
        table: Versions of the pages that were submitted to the writer.
        epoch: Epoch under which pages are written.
        last_sequence: Largest sequence number of the session's own pages.
        length: Tokens whose rows the session has.
        behind: Full-size pages of the rows behind the table's pages, in memory alone; the last one may
            have room.
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
    last_sequence: int = 0
    length: int = 0
    behind: list[Tensor] = field(default_factory=list)
    loaded: bool = False
    truncation_pending: bool = False
    unopened: bool = False
    removed: bool = False

    def unload(self) -> None:
        """Forget everything but the epoch: only the tiers say what rows there are."""
        self.table = PageTable(self.name)
        self.length = 0
        self.behind = []
        self.loaded = False
        self.unopened = True

    def next_sequence(self) -> int:
        """Sequence number for the next page version: the epoch, then a count.

        Each epoch counts from 1. Raises StaleWriterError when it has no more numbers: the session
        must be opened under a later one.
        """
        sequence = max(self.last_sequence, first_sequence(self.epoch)) + 1
        if get_epoch(sequence) > self.epoch:
            raise StaleWriterError(
                f"epoch {self.epoch} of session {self.name!r} has no more page versions; "
                "open the session under a later epoch"
            )
        self.last_sequence = sequence
        return sequence
