"""Interface of all tiers. Pages are bytes; every call takes a batch."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvstore.format.page import Blob, PageHeader, PageKey

UNFENCED = (1 << 21) - 1
"""Epoch that passes every fence: for a page that is restored unchanged for the sessions that share
it. Epochs of sessions are lower, so that sequence numbers stay below 2 ** 53."""


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
    def used_bytes(self) -> int:
        """Bytes of the pages that the tier holds, headers included."""
        ...

    def fence(self, session: str, epoch: int) -> None:
        """Refuse writes and deletions of the session under earlier epochs from now on.

        Raises StaleWriterError when a later epoch has fenced it. Unshared tiers do nothing.
        """
        ...

    def get(self, keys: Sequence[PageKey]) -> list[Blob | None]:
        """Return pages in the order of `keys`, None where the tier has none.

        Raises CorruptPageError when the checksum of a page that left this process's memory does
        not match.
        """
        ...

    def put(
        self,
        pages: Sequence[tuple[PageKey, Blob]],
        *,
        backed: bool = False,
        epoch: int | None = None,
    ) -> None:
        """Store sealed pages; each replaces a version with a lower or equal sequence number.

        `backed`: a lower tier holds the same pages, so this tier may drop them to make room.
        Raises TierFullError when there is neither room nor a page that may be dropped, and
        StaleWriterError when the session was fenced under a later epoch than `epoch` (by default,
        than those of the pages' sequence numbers).
        """
        ...

    def touch(self, session: str) -> None:
        """Restart the time to live of a session's pages. Tiers without one do nothing."""
        ...

    def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        """Return whether the tier has each page."""
        ...

    def delete(self, keys: Sequence[PageKey], *, epoch: int | None = None) -> None:
        """Delete pages; the deletion is durable after `flush`. Unknown keys are ignored.

        Raises StaleWriterError when `epoch` is given and a session was fenced under a later one.
        """
        ...

    def stored(self, session: str | None = None) -> Iterator[PageHeader]:
        """Return the headers of all stored pages, or of those of one session."""
        ...

    def session_headers(self) -> Iterator[PageHeader]:
        """Return one header per session, of any of its pages."""
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


def one_per_session(headers: Iterable[PageHeader]) -> Iterator[PageHeader]:
    """Reduce headers to one per session, as `Tier.session_headers` returns them."""
    return iter({header.key.session: header for header in headers}.values())
