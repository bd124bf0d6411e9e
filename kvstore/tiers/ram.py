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
from kvstore.format.page import Blob, PageHeader, PageKey, parse_header, read_sequence
from kvstore.format.page_table import PageVersion
from kvstore.tiers.arena import Arena
from kvstore.tiers.base import one_per_session

# Pages that are dropped for one, where the free memory is in pieces: that of pages which are still
# read does not come free.
_MOST_DROPPED = 4
# Of the limit, one part in so many is never reserved: new pages pass through it, and it has those that
# no lower tier accepts.
_KEPT_SHARE = 4


@dataclass(frozen=True)
class _Resident:
    blob: memoryview
    backed: bool
    sequence: int
    held_as: PageVersion | None = None

    def is_read_as(self, version: PageVersion) -> bool:
        """Whether readers of a version get this page's own memory, and no decoded copy."""
        return self.sequence == version.sequence and parse_header(self.blob).codec == Codec.RAW

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

    def __init__(self, limit_bytes: int, name: str = "ram") -> None:
        self.name = name
        self.limit_bytes = limit_bytes
        self._arena = Arena(limit_bytes)
        # Coldest first. Two maps, so that the search for a page to drop skips those that are not
        # backed, or are held.
        self._droppable: OrderedDict[PageKey, _Resident] = OrderedDict()
        self._kept: dict[PageKey, _Resident] = {}
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
        share = self.limit_bytes - self.limit_bytes // _KEPT_SHARE
        return min(share, self.limit_bytes - self._unbacked_bytes)

    def reserve(self, reserved_bytes: int, pages: Iterable[PageVersion] = ()) -> bool:
        """Set the bytes that readers have. `pages` are new among them: those that are here are held.

        The coldest backed pages without a reader make room. Returns False, and changes nothing, where
        `reserved_bytes` are more than before and more than `reservable_bytes`.
        """
        with self._lock:
            if reserved_bytes > max(self._reserved_bytes, self.reservable_bytes):
                return False
            for version in pages:
                page = self._find(version.key)
                if page is not None and page.is_read_as(version):
                    self._hold(version, page)
            self._reserved_bytes = reserved_bytes
            self._make_room(0)
            # What readers have elsewhere and what the arena keeps of dropped pages is one limit too.
            elsewhere = self._reserved_bytes - self._held_bytes
            self._arena.trim(max(0, self.limit_bytes - elsewhere))
            return True

    def hold(self, version: PageVersion, address: int) -> None:
        """Hold a page that came here since its bytes were reserved, if it has the reader's `address`.

        A held page counts among the reserved bytes, and is never dropped. A reader whose copy lies
        elsewhere holds nothing of this tier.
        """
        with self._lock:
            page = self._find(version.key)
            if page is not None and page.lies_at(address):
                self._hold(version, page)

    def release(self, version: PageVersion) -> None:
        """Hold a page no more: it takes its bytes along from the reserved ones."""
        with self._lock:
            page = self._find(version.key)
            if page is not None and page.held_as == version:
                self._reserved_bytes -= len(page.blob)
                self._replace(version.key, replace(page, held_as=None))

    def get_device(self) -> None:
        """Return None: memory is no file system."""

    def fence(self, session: str, epoch: int) -> None:
        """Do nothing: no other process can write here."""

    def get(self, keys: Sequence[PageKey]) -> list[Blob | None]:
        """Return views of resident pages, None where there is none; marks them as recently used."""
        with self._lock:
            self._require_open()
            return [self._touch(key) for key in keys]

    def put(
        self,
        pages: Sequence[tuple[PageKey, Blob]],
        *,
        backed: bool = False,
        epoch: int | None = None,
    ) -> None:
        """Copy pages into the arena, dropping the coldest droppable pages if necessary.

        Raises TierFullError before anything is dropped.
        """
        with self._lock:
            self._require_open()
            for key, blob in pages:
                self._put_one(key, blob, backed)

    def touch(self, session: str) -> None:
        """Do nothing: pages in memory do not expire."""

    def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        """Return whether each page is resident."""
        with self._lock:
            return [self._find(key) is not None for key in keys]

    def delete(self, keys: Sequence[PageKey], *, epoch: int | None = None) -> None:
        """Delete pages; unknown keys are ignored."""
        with self._lock:
            self._require_open()
            for key in keys:
                self._remove(key)

    def stored(self, session: str | None = None) -> Iterator[PageHeader]:
        """Return the headers of all resident pages, or of those of one session."""
        with self._lock:
            resident = [*self._droppable.items(), *self._kept.items()]
        return (parse_header(page.blob) for key, page in resident if session in (None, key.session))

    def session_headers(self) -> Iterator[PageHeader]:
        """Return one header per session, of any of its pages."""
        return one_per_session(self.stored())

    def flush(self) -> None:
        """Do nothing: memory is never durable."""
        with self._lock:
            self._require_open()

    def check(self) -> None:
        """Raise InvariantError when the counted bytes disagree with the resident pages."""
        with self._lock:
            pages = [*self._droppable.values(), *self._kept.values()]
            total = sum(len(page.blob) for page in pages)
            held = sum(len(page.blob) for page in pages if page.held_as is not None)
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

    def _put_one(self, key: PageKey, blob: Blob, backed: bool) -> None:
        sequence = read_sequence(blob)
        resident = self._find(key)
        if resident is not None and resident.sequence > sequence:
            return
        if resident is not None and resident.sequence == sequence and _is_equal(resident, blob):
            # Readers may hold it where it is.
            self._replace(key, replace(resident, backed=backed))
            return
        self._require_room(len(blob), resident)
        self._remove(key)
        self._replace(key, _Resident(self._copy_in(blob), backed, sequence))

    def _require_room(self, needed: int, replaced: _Resident | None) -> None:
        """Raise TierFullError, before anything is dropped, unless `needed` bytes can fit."""
        kept_bytes = self._used_bytes - self._droppable_bytes - self._held_bytes
        if replaced is not None and not replaced.backed and replaced.held_as is None:
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

    def _touch(self, key: PageKey) -> memoryview | None:
        resident = self._find(key)
        if resident is None:
            return None
        if key in self._droppable:
            self._droppable.move_to_end(key)
        return resident.blob

    def _find(self, key: PageKey) -> _Resident | None:
        return self._droppable.get(key) or self._kept.get(key)

    def _hold(self, version: PageVersion, page: _Resident) -> None:
        if page.held_as is None:
            self._replace(version.key, replace(page, held_as=version))

    def _replace(self, key: PageKey, page: _Resident) -> None:
        """Put a page in the place of one that was here; it is then the last used one."""
        self._remove(key)
        (self._droppable if page.backed and page.held_as is None else self._kept)[key] = page
        self._count(page, 1)

    def _remove(self, key: PageKey) -> None:
        page = self._droppable.pop(key, None) or self._kept.pop(key, None)
        if page is not None:
            self._count(page, -1)

    def _count(self, page: _Resident, sign: int) -> None:
        size = sign * len(page.blob)
        self._used_bytes += size
        self._held_bytes += size * (page.held_as is not None)
        self._unbacked_bytes += size * (not page.backed)
        self._droppable_bytes += size * (page.backed and page.held_as is None)

    def _require_open(self) -> None:
        if self._closed:
            raise StoreClosedError(f"tier {self.name} is closed")


def _is_equal(resident: _Resident, blob: Blob) -> bool:
    """Whether a page has the bytes of a resident one."""
    mine, theirs = (np.frombuffer(each, dtype=np.uint8) for each in (resident.blob, blob))
    return np.array_equal(mine, theirs)
