"""Tier in a bucket of object storage, for pages that are seldom read.

A page is one object, which is stored whole. The tier knows what is there from an index in memory
(`BucketIndex`): a list of the bucket, which `refresh` reads, and what this process stored and deleted
since. So most questions cost no request. Nothing expires here.

Durable means what the service promises: `put` returns when it has confirmed every object.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from threading import Lock

from kvstore.errors import (
    CorruptPageError,
    PageError,
    StoreClosedError,
    TierFailedError,
    TierFullError,
)
from kvstore.format.page import (
    HEADER_BYTES,
    ID_BYTES,
    Blob,
    PageHeader,
    PageId,
    PageLayout,
    parse_header,
    verify_checksum,
)
from kvstore.tiers.bucket.address import BucketAddress
from kvstore.tiers.bucket.client import BucketClient
from kvstore.tiers.bucket.index import BucketIndex
from kvstore.tiers.bucket.names import ObjectNames

_BATCH_PAGES = 1000


class BucketTier:
    """A Tier in the bucket at `address`; stores of other models or layouts share it unseen.

    Args:
        address: Where the bucket is.
        layout: Shape, dtype and fingerprint of the rows.
        limit_bytes: Maximum bytes of the pages of this folder and layout. Several writers may exceed it
            by what each stored since the other's last listing.
        timeout_seconds: Seconds after which a silent bucket counts as failed.
        name: Name of the tier for metrics.

    Raises:
        TierSettingsError: obstore is not installed, or cannot use the address. Nothing is sent yet:
            a bucket that does not answer fails the first call.
    """

    durable = True
    shared = True
    life_seconds = None

    def __init__(
        self,
        address: BucketAddress,
        layout: PageLayout,
        *,
        limit_bytes: int | None = None,
        timeout_seconds: float = 10.0,
        name: str = "bucket",
    ) -> None:
        self.name = name
        self.limit_bytes = limit_bytes
        self._names = ObjectNames.build(address.folder, layout)
        self._client = BucketClient(address, self._names.prefix, timeout_seconds)
        self._index = BucketIndex()
        self._listing = Lock()
        self._closed = False

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages of all workers, headers included, as the index knows them."""
        return self._index.used_bytes

    @property
    def is_listed(self) -> bool:
        """True once the bucket was listed: pages that the index does not have are not there."""
        return self._index.is_listed

    @property
    def has_failed(self) -> bool:
        """True while calls fail at once, after one that failed: until a probe succeeds."""
        return self._client.has_failed

    def probe(self) -> None:
        """Find out whether the bucket answers again. Raises TierFailedError."""
        self._require_open()
        self._client.probe(self._names.page(bytes(ID_BYTES)))

    def knows(self, page_id: PageId) -> bool:
        """Return whether the index has an intact page; sends nothing."""
        return self._index.has(page_id)

    def has_object(self, page_id: PageId) -> bool:
        """Return whether the index has a page, intact or not; sends nothing."""
        return bool(self._index.get_size(page_id)) or self._index.is_damaged(page_id)

    def get(self, ids: Sequence[PageId]) -> list[Blob | None]:
        """Read and verify pages, None where there is none. Raises CorruptPageError.

        Once the bucket was listed, pages that the index does not have are not asked for.
        """
        self._require_open()
        wanted = [page_id for page_id in ids if not self.is_listed or self.has_object(page_id)]
        found = dict(zip(wanted, self._client.get(self._name(wanted)), strict=True))
        self._index.remove(page_id for page_id, blob in found.items() if blob is None)
        for page_id, blob in found.items():
            if blob is not None:
                self._verify(page_id, blob)
        return [found.get(page_id) for page_id in ids]

    def put(self, pages: Sequence[tuple[PageId, Blob]], *, backed: bool = False) -> None:
        """Store pages side by side; those that were stored when one fails stay."""
        self._require_open()
        self._require_room(dict(pages))
        self._client.put_each(list(dict(pages).items()), self._put)

    def keep(self, ids: Sequence[PageId]) -> None:
        """Do nothing: pages in a bucket do not expire."""

    def contains(self, ids: Sequence[PageId]) -> list[bool]:
        """Return whether the bucket has each page; those that the index does not have are asked for.

        A bucket that does not answer has none of these, if it was listed before; else this raises
        TierFailedError.
        """
        self._require_open()
        unknown = [page_id for page_id in ids if not self.has_object(page_id)]
        try:
            self.look_for(unknown)
        except TierFailedError:
            if not self.is_listed:
                raise
        return [self._index.has(page_id) for page_id in ids]

    def look_for(self, ids: Sequence[PageId]) -> list[bool]:
        """Ask the bucket for each page, whatever the index has; return whether it has an intact one."""
        self._require_open()
        for page_id, found in zip(ids, self._client.find(self._name(ids)), strict=True):
            if found is None:
                self._index.remove([page_id])
            elif not self._index.get_size(page_id):
                self._index.add(page_id, found.size, found.stored_at)
        return [self._index.has(page_id) for page_id in ids]

    def delete(self, ids: Sequence[PageId]) -> None:
        """Delete pages at once; unknown ids are ignored."""
        self._require_open()
        self._client.delete(self._name(ids))
        self._index.remove(ids)

    def refresh(self) -> None:
        """List the bucket into the index. Raises TierFailedError, which changes nothing."""
        self._require_open()
        with self._listing, self._index.listing() as found:
            for objects in self._client.list_all():
                for each in objects:
                    if (page_id := self._names.read_id(each.name)) is not None:
                        found[page_id] = (each.size, each.stored_at)

    def stored(self) -> Iterator[PageHeader]:
        """List the bucket, and yield the headers of all pages; of broken ones `page_tokens` is 0."""
        self.refresh()
        ids = self._index.list_ids(1 << 62)
        for first in range(0, len(ids), _BATCH_PAGES):
            batch = ids[first : first + _BATCH_PAGES]
            starts = self._client.get_starts(self._name(batch), HEADER_BYTES)
            for page_id, start in zip(batch, starts, strict=True):
                if start is not None:
                    yield _parse(page_id, start, self._index.get_size(page_id))

    def list_ids(self, written_before: int) -> list[PageId]:
        """Return the ids of the pages that were written before a time in unix seconds.

        Of a page that another process stored, or this one before a restart, when it was stored counts.
        Lists the bucket if that was never done.
        """
        self._require_open()
        if not self.is_listed:
            self.refresh()
        return self._index.list_ids(written_before)

    def flush(self) -> None:
        """Do nothing: `put` and `delete` return when the bucket has confirmed them."""
        self._require_open()

    def get_device(self) -> None:
        """Return None: a bucket has no disk to look at."""

    def check(self) -> None:
        """Raise InvariantError when the index disagrees with itself."""
        self._index.check()

    def close(self) -> None:
        """Wait for the requests that run, and close. May be called twice."""
        self._closed = True
        self._client.close()

    def _name(self, ids: Sequence[PageId]) -> list[str]:
        return [self._names.page(page_id) for page_id in ids]

    def _put(self, page: tuple[PageId, Blob]) -> None:
        page_id, blob = page
        self._client.put(self._names.page(page_id), blob)
        self._index.add(page_id, len(blob), parse_header(blob).written_at)

    def _verify(self, page_id: PageId, blob: Blob) -> None:
        try:
            verify_checksum(blob, page_id)
        except CorruptPageError:
            self._index.mark_damaged(page_id)
            raise
        self._index.add(page_id, len(blob), parse_header(blob).written_at)

    def _require_room(self, pages: dict[PageId, Blob]) -> None:
        """Raise TierFullError unless pages fit the limit."""
        if self.limit_bytes is None:
            return
        needed = sum(len(blob) - self._index.get_size(page_id) for page_id, blob in pages.items())
        if needed > 0 and self.used_bytes + needed > self.limit_bytes:
            raise TierFullError(
                f"{self._client}: {needed} bytes do not fit, {self.used_bytes} of "
                f"{self.limit_bytes} are in use; raise its limit or delete sessions"
            )

    def _require_open(self) -> None:
        if self._closed:
            raise StoreClosedError(f"tier {self.name} is closed")


def _parse(page_id: PageId, start: Blob, size: int) -> PageHeader:
    """Parse a page's header; an unreadable one becomes a header without the fields of a layout."""
    with suppress(PageError):
        parsed = parse_header(start)
        if parsed.id == page_id:
            return parsed
    return PageHeader(page_id, max(0, size - HEADER_BYTES))
