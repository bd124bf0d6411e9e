"""Interface of all tiers. Pages are bytes, named by their ids; every call takes a batch."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvstore.format.page import Blob, PageHeader, PageId


@dataclass(frozen=True)
class DeviceStatus:
    """The file system under a tier.

    Attributes:
        free_bytes: Bytes that the file system has left.
        dead_bytes: Bytes of deleted pages that a compaction will free.
        compactions: Segments that compactions moved since the tier was opened.
    """

    free_bytes: int
    dead_bytes: int
    compactions: int


class Tier(Protocol):
    """Storage for pages. Safe to call from several threads.

    Equal ids are equal pages, so whoever puts one asks before whether it is here (`keep`, `contains`).
    Calls raise TierFullError or TierFailedError (acknowledged pages are still stored), and
    StoreClosedError after `close`.
    """

    @property
    def name(self) -> str:
        """Short name for metrics, unique within a store."""
        ...

    @property
    def durable(self) -> bool:
        """True when pages that were put and flushed outlive the process."""
        ...

    @property
    def shared(self) -> bool:
        """True when other processes may write to the tier too."""
        ...

    @property
    def limit_bytes(self) -> int | None:
        """Maximum bytes that the tier accepts; None when only its device limits it."""
        ...

    @property
    def life_seconds(self) -> float | None:
        """Seconds after which a page ends that was kept; None when none ever does.

        One that was put and never kept may end earlier.
        """
        ...

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages that the tier holds, headers included."""
        ...

    def get(self, ids: Sequence[PageId]) -> list[Blob | None]:
        """Return pages in the order of `ids`, None where the tier has none.

        Raises CorruptPageError when the checksum of a page that left this process's memory does
        not match. From then on `contains` does not count that page, until it is put again.
        """
        ...

    def put(self, pages: Sequence[tuple[PageId, Blob]], *, backed: bool = False) -> None:
        """Store sealed pages; one that is here is replaced, since it may be damaged.

        `backed`: a lower tier holds the same pages, so this tier may drop them to make room.
        Raises TierFullError when there is neither room nor a page that may be dropped.
        """
        ...

    def keep(self, ids: Sequence[PageId]) -> None:
        """Restart the time to live of pages. Unknown ids are ignored; tiers without one do nothing.

        Pages that are there when it returns are there for the next `life_seconds`, unless they are
        deleted.
        """
        ...

    def contains(self, ids: Sequence[PageId]) -> list[bool]:
        """Return whether the tier has each page."""
        ...

    def delete(self, ids: Sequence[PageId]) -> None:
        """Delete pages; the deletion is durable after `flush`. Unknown ids are ignored.

        A shared tier lets them go a little later, unless they are kept or put again by then: another
        process may be about to use them.
        """
        ...

    def stored(self) -> Iterator[PageHeader]:
        """Yield the headers of all stored pages; reads no payloads.

        An unreadable header becomes one without the fields of a layout: its `page_tokens` is 0.
        """
        ...

    def list_ids(self, written_before: int) -> list[PageId]:
        """Return the ids of the pages that `was_written_before` a time in unix seconds, in no order."""
        ...

    def flush(self) -> None:
        """Wait until everything put or deleted before is as durable as this tier can make it."""
        ...

    def get_device(self) -> DeviceStatus | None:
        """Return the state of the file system that the tier is on; None for one without files."""
        ...

    def check(self) -> None:
        """Raise InvariantError when the tier's accounting disagrees with its contents."""
        ...

    def close(self) -> None:
        """Release the tier's resources. May be called twice."""
        ...


def was_written_before(written_at: int, before: int) -> bool:
    """True for a page from before a time, or from the future: the clock has gone back since. Unix seconds."""
    return written_at < before or written_at > time.time() + 1
