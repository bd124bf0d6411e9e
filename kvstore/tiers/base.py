"""What every tier offers. Pages go in and come out as bytes; every call takes a batch."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from kvstore.page import Blob, PageHeader, PageKey


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
    def used_bytes(self) -> int:
        """Bytes of the pages that the tier holds, headers included."""
        ...

    def get(self, keys: Sequence[PageKey]) -> list[Blob | None]:
        """The pages in the order of `keys`, None where the tier has none.

        A page that left this process's memory meanwhile comes back only if its checksum holds; otherwise the
        call raises CorruptPageError.
        """
        ...

    def put(self, pages: Sequence[tuple[PageKey, Blob]], *, backed: bool = False) -> None:
        """Keep sealed pages; each replaces what its key held with a lower or equal sequence number.

        `backed` says that a lower tier holds the same pages: this tier may then drop them when it needs room.
        Raises TierFullError when there is no room and nothing that may be dropped.
        """
        ...

    def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        """For each key whether `get` would find it."""
        ...

    def delete(self, keys: Sequence[PageKey]) -> None:
        """Forget pages, for good: they do not come back after a restart. Unknown keys are ignored."""
        ...

    def stored(self) -> Iterator[PageHeader]:
        """The header of every page the tier holds."""
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
