"""What every tier offers. Pages go in and come out as bytes; every call takes a batch."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from kvstore.format.page import Blob, PageHeader, PageKey

UNFENCED = (1 << 21) - 1
"""An epoch that every fence lets through: for a page that is put back as it was, for whoever shares it. Epochs of
sessions are lower, so that a sequence number stays below 2 ** 53."""


class Tier(Protocol):
    """A place that keeps pages. Safe to call from several threads.

    Calls raise TierFullError or TierFailedError (what the tier acknowledged before still stands) and
    StoreClosedError after `close`.
    """

    @property
    def name(self) -> str:
        """Short name for metrics, unique within a store."""
        ...

    @property
    def durable(self) -> bool:
        """Whether what was put and flushed outlives the process."""
        ...

    @property
    def shared(self) -> bool:
        """Whether other processes may write to the tier too."""
        ...

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages that the tier holds, headers included."""
        ...

    @property
    def limit_bytes(self) -> int | None:
        """The most bytes that the tier takes; None: as many as there is room for."""
        ...

    def fence(self, session: str, epoch: int) -> None:
        """From now on refuse whoever writes or deletes pages of the session under an earlier epoch.

        Raises StaleWriterError when a later one has fenced it already. Only a shared tier has anything to do.
        """
        ...

    def get(self, keys: Sequence[PageKey]) -> list[Blob | None]:
        """The pages in the order of `keys`, None where the tier has none.

        A page that left this process's memory meanwhile comes back only if its checksum holds; otherwise the
        call raises CorruptPageError.
        """
        ...

    def put(
        self,
        pages: Sequence[tuple[PageKey, Blob]],
        *,
        backed: bool = False,
        epoch: int | None = None,
    ) -> None:
        """Keep sealed pages; each replaces what its key held with a lower or equal sequence number.

        `backed` says that a lower tier holds the same pages: this tier may then drop them when it needs room.
        Raises TierFullError when there is no room and nothing that may be dropped, StaleWriterError when the session
        was fenced under a later epoch than `epoch`; where that is not given, than those of the pages' sequence numbers.
        """
        ...

    def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        """For each key whether `get` would find it."""
        ...

    def delete(self, keys: Sequence[PageKey], *, epoch: int | None = None) -> None:
        """Forget pages, for good: they do not come back after a restart. Unknown keys are ignored.

        Raises StaleWriterError when a session was fenced under a later epoch than `epoch`, where it is given.
        """
        ...

    def stored(self, session: str | None = None) -> Iterator[PageHeader]:
        """The header of every page the tier holds, or of those of one session."""
        ...

    def flush(self) -> None:
        """Return when everything put before is as durable as this tier can make it."""
        ...

    def check(self) -> None:
        """Raise InvariantError when the tier's books disagree with what it holds."""
        ...

    def close(self) -> None:
        """Release what the tier holds open. May be called twice."""
        ...
