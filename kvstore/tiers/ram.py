"""Tier in host memory under a byte limit, which readers share; the coldest pages are dropped first.

A page is copied once, when it is put. `get` returns a view of the arena without copying; the memory
is reused only after the page was dropped and nothing refers to the view any more.

Readers that keep pages for long reserve bytes of the same limit. The tier's own pages have what that
leaves. A page that is held where it lies in the arena counts once: among the reserved bytes.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from threading import Lock

import numpy as np

from kvstore.errors import InvariantError, StoreClosedError, TierFullError
from kvstore.format.codec import Codec
from kvstore.format.page import HEADER_BYTES, Blob, PageHeader, PageId, parse_header
from kvstore.tiers.arena import Arena
from kvstore.tiers.base import was_written_before

# Pages that are dropped for one, where the free memory is in pieces: that of pages which are still
# read does not come free.
_MOST_DROPPED = 4
# Of the limit, one part in so many is never reserved: new pages pass through it, and it has those that
# no lower tier accepts.
KEPT_SHARE = 4


@dataclass(frozen=True)
class _Resident:
    blob: memoryview
    backed: bool
    held: bool = False

    def is_read_in_place(self) -> bool:
        """Whether readers get this page's own memory, and no decoded copy."""
        return parse_header(self.blob).codec == Codec.RAW

    def has_rows_of(self, blob: Blob) -> bool:
        """Whether another copy of the page has the same rows in the same form."""
        mine, theirs = (
            np.frombuffer(each, dtype=np.uint8)[HEADER_BYTES:] for each in (self.blob, blob)
        )
        return np.array_equal(mine, theirs)

    def lies_at(self, address: int) -> bool:
        """Whether the byte at an address is one of this page's."""
        begin = np.frombuffer(self.blob, dtype=np.uint8).ctypes.data
        return begin <= address < begin + len(self.blob)


class RamTier:
    """A Tier in host memory; only pages that a lower tier holds too are dropped to make room.

    The limit is of the resident pages and the reserved bytes, in which a held page counts already.
    Memory beyond it is used while dropped pages are still being read, and for unbacked pages when
    the free memory is fragmented. Raises TierSettingsError when the memory cannot be allocated.
    """

    durable = False
    shared = False
    life_seconds = None

    def __init__(self, limit_bytes: int, name: str = "ram") -> None:
        self.name = name
        self.limit_bytes = limit_bytes
        self._arena = Arena(limit_bytes)
        # Coldest first. Two maps, so that the search for a page to drop skips those that are not
        # backed, or are held.
        self._droppable: OrderedDict[PageId, _Resident] = OrderedDict()
        self._kept: dict[PageId, _Resident] = {}
        self._used_bytes = 0
        self._droppable_bytes = 0
        self._unbacked_bytes = 0
        self._held_bytes = 0
        self._reserved_bytes = 0
        self._closed = False
        self._lock = Lock()

    @property
    def used_bytes(self) -> int:
        """Bytes of the resident pages, headers included."""
        return self._used_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of the resident pages that readers hold, which are among the reserved ones."""
        return self._held_bytes

    @property
    def room_bytes(self) -> int:
        """Bytes for pages that no reader holds: the limit less the reserved bytes."""
        return self.limit_bytes - self._reserved_bytes

    @property
    def reservable_bytes(self) -> int:
        """Most bytes that readers may reserve now: three quarters of the limit.

        Less where unbacked pages, held or not, have more than the last quarter.
        """
        share = self.limit_bytes - self.limit_bytes // KEPT_SHARE
        return min(share, self.limit_bytes - self._unbacked_bytes)

    def reserve(self, reserved_bytes: int, ids: Iterable[PageId] = ()) -> bool:
        """Set the bytes that readers have. The pages `ids` are new among them: those that are here are held.

        The coldest backed pages without a reader make room. Returns False, and changes nothing, where
        `reserved_bytes` are more than before and more than `reservable_bytes`.
        """
        with self._lock:
            if reserved_bytes > max(self._reserved_bytes, self.reservable_bytes):
                return False
            for page_id in ids:
                page = self._find(page_id)
                if page is not None and page.is_read_in_place():
                    self._hold(page_id, page)
            self._reserved_bytes = reserved_bytes
            self._make_room(0)
            # What readers have elsewhere and what the arena keeps of dropped pages is one limit too.
            elsewhere = self._reserved_bytes - self._held_bytes
            self._arena.trim(max(0, self.limit_bytes - elsewhere))
            return True

    def hold(self, page_id: PageId, address: int) -> None:
        """Hold a page that came here since its bytes were reserved, if it has the reader's `address`.

        A held page counts among the reserved bytes, and is never dropped. A reader whose copy lies
        elsewhere holds nothing of this tier.
        """
        with self._lock:
            page = self._find(page_id)
            if page is not None and page.lies_at(address):
                self._hold(page_id, page)

    def release(self, page_id: PageId) -> None:
        """Hold a page no more: it takes its bytes along from the reserved ones."""
        with self._lock:
            page = self._find(page_id)
            if page is not None and page.held:
                self._reserved_bytes -= len(page.blob)
                self._replace(page_id, replace(page, held=False))

    def get_device(self) -> None:
        """Return None: memory is no file system."""

    def get(self, ids: Sequence[PageId]) -> list[Blob | None]:
        """Return views of resident pages, None where there is none; marks them as recently used."""
        with self._lock:
            self._require_open()
            return [self._touch(page_id) for page_id in ids]

    def put(self, pages: Sequence[tuple[PageId, Blob]], *, backed: bool = False) -> None:
        """Copy pages into the arena, dropping the coldest droppable pages if necessary.

        A resident page with the same rows stays where it is, as readers may hold it; whether it is backed
        is as of now.
        Raises TierFullError before anything is dropped.
        """
        with self._lock:
            self._require_open()
            for page_id, blob in pages:
                self._put_one(page_id, blob, backed)

    def keep(self, ids: Sequence[PageId]) -> None:
        """Do nothing: pages in memory do not expire."""

    def contains(self, ids: Sequence[PageId]) -> list[bool]:
        """Return whether each page is resident."""
        with self._lock:
            return [self._find(page_id) is not None for page_id in ids]

    def delete(self, ids: Sequence[PageId]) -> None:
        """Delete pages; unknown ids are ignored."""
        with self._lock:
            self._require_open()
            for page_id in ids:
                self._remove(page_id)

    def stored(self) -> Iterator[PageHeader]:
        """Yield the headers of all resident pages."""
        with self._lock:
            pages = [*self._droppable.values(), *self._kept.values()]
        return (parse_header(page.blob) for page in pages)

    def list_ids(self, written_before: int) -> list[PageId]:
        """Return the ids of the pages that were written before a time in unix seconds."""
        return [
            header.id
            for header in self.stored()
            if was_written_before(header.written_at, written_before)
        ]

    def flush(self) -> None:
        """Do nothing: memory is never durable."""
        with self._lock:
            self._require_open()

    def check(self) -> None:
        """Raise InvariantError when the counted bytes disagree with the resident pages."""
        with self._lock:
            pages = [*self._droppable.values(), *self._kept.values()]
            total = sum(len(page.blob) for page in pages)
            held = sum(len(page.blob) for page in pages if page.held)
            unbacked = sum(len(page.blob) for page in pages if not page.backed)
            counted = (self._used_bytes, self._held_bytes, self._unbacked_bytes)
            everything = total - held + self._reserved_bytes
            if (total, held, unbacked) != counted or everything > self.limit_bytes:
                raise InvariantError(
                    f"tier {self.name}: {total} bytes, {held} held, {unbacked} unbacked, counted as "
                    f"{counted}, and {self._reserved_bytes} reserved; limit {self.limit_bytes}"
                )

    def close(self) -> None:
        """Free the memory. May be called twice."""
        with self._lock:
            self._arena = Arena(0)
            self._droppable.clear()
            self._kept.clear()
            self._used_bytes = self._droppable_bytes = 0
            self._unbacked_bytes = self._held_bytes = 0
            self._closed = True

    def _put_one(self, page_id: PageId, blob: Blob, backed: bool) -> None:
        resident = self._find(page_id)
        if resident is not None and resident.has_rows_of(blob):
            self._replace(page_id, replace(resident, backed=backed))
            return
        self._require_room(len(blob), resident)
        self._remove(page_id)
        self._replace(page_id, _Resident(self._copy_in(blob), backed))

    def _require_room(self, needed: int, replaced: _Resident | None) -> None:
        """Raise TierFullError, before anything is dropped, unless `needed` bytes can fit."""
        kept_bytes = self._used_bytes - self._droppable_bytes - self._held_bytes
        if replaced is not None and not replaced.backed and not replaced.held:
            kept_bytes -= len(replaced.blob)
        if needed > self.room_bytes - kept_bytes:
            raise TierFullError(
                f"tier {self.name}: {needed} bytes do not fit, {kept_bytes} of {self.limit_bytes} "
                f"are in use by pages that no lower tier holds, and {self._reserved_bytes} by open "
                "sessions; raise its limit, delete sessions or add a lower tier"
            )

    def _make_room(self, needed: int) -> None:
        """Drop the coldest pages until `needed` bytes more are within the limit."""
        while (
            self._droppable
            and self._used_bytes - self._held_bytes + needed
            > self.limit_bytes - self._reserved_bytes
        ):
            self._drop_coldest()

    def _copy_in(self, blob: Blob) -> memoryview:
        """Copy a page into the arena, dropping the coldest droppable pages until it fits."""
        self._make_room(len(blob))
        dropped = 0
        while (part := self._arena.allocate(len(blob))) is None and dropped < _MOST_DROPPED:
            if not self._droppable:
                break
            self._drop_coldest()
            dropped += 1
        if part is None:
            part = np.empty(len(blob), dtype=np.uint8)
        part[:] = np.frombuffer(blob, dtype=np.uint8)
        return part.data

    def _drop_coldest(self) -> None:
        self._remove(next(iter(self._droppable)))

    def _touch(self, page_id: PageId) -> memoryview | None:
        resident = self._find(page_id)
        if resident is None:
            return None
        if page_id in self._droppable:
            self._droppable.move_to_end(page_id)
        return resident.blob

    def _find(self, page_id: PageId) -> _Resident | None:
        return self._droppable.get(page_id) or self._kept.get(page_id)

    def _hold(self, page_id: PageId, page: _Resident) -> None:
        if not page.held:
            self._replace(page_id, replace(page, held=True))

    def _replace(self, page_id: PageId, page: _Resident) -> None:
        """Put a page in the place of one that was here; it is then the last used one."""
        self._remove(page_id)
        (self._droppable if page.backed and not page.held else self._kept)[page_id] = page
        self._count(page, 1)

    def _remove(self, page_id: PageId) -> None:
        page = self._droppable.pop(page_id, None) or self._kept.pop(page_id, None)
        if page is not None:
            self._count(page, -1)

    def _count(self, page: _Resident, sign: int) -> None:
        size = sign * len(page.blob)
        self._used_bytes += size
        self._held_bytes += size * page.held
        self._unbacked_bytes += size * (not page.backed)
        self._droppable_bytes += size * (page.backed and not page.held)

    def _require_open(self) -> None:
        if self._closed:
            raise StoreClosedError(f"tier {self.name} is closed")
