"""Index of a segment log: the valid record of each page, and the segments that may be removed."""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from kvstore.errors import InvariantError
from kvstore.format.page import HEADER_BYTES, PageId

# Bits of a packed location: time, segment, offset, size.
_SEGMENT_BITS, _OFFSET_BITS, _SIZE_BITS = 32, 40, 32
_TIME_SHIFT = _SEGMENT_BITS + _OFFSET_BITS + _SIZE_BITS


class RecordLocation(NamedTuple):
    """Location and size in bytes of a page's record, and when the page was written (unix seconds)."""

    segment: int
    offset: int
    size: int
    written_at: int

    @property
    def position(self) -> tuple[int, int]:
        """Position in the log; orders records by age, oldest first."""
        return (self.segment, self.offset)


class LogIndex:
    """Last record of every page in a log of segments, and the accounting to free segments.

    Records are added in their order in the log. Copies of a page are equal, so any could be read: it
    is the last one, since compaction writes a record again at the end of the log, so that its segment
    can be removed. A tombstone ends all copies before it, and must outlive them; without it a restart
    would bring them back.

    A page takes about 150 bytes of memory: its location is packed into one integer.
    """

    def __init__(self) -> None:
        self.used_bytes = 0
        self._pages: dict[PageId, int] = {}
        self._damaged: set[PageId] = set()
        self._live: Counter[int] = Counter()
        self._live_bytes: Counter[int] = Counter()
        self._dead: dict[int, Counter[PageId]] = {}
        self._dead_copies: Counter[PageId] = Counter()
        self._tombstone_segments: dict[PageId, int] = {}
        # Of these, by segment, the ones that a restart needs: counted when something changes, since
        # every flush asks for them.
        self._needed_tombstones: dict[int, set[PageId]] = {}

    def add_page(self, page_id: PageId, location: RecordLocation) -> None:
        """Add a written page: of its copies, this one is valid from now on."""
        # A start adds millions of pages, nearly all of them for the first time.
        if page_id in self._pages:
            self._remove(page_id)
        if page_id in self._tombstone_segments:
            self._clear_tombstone(page_id)
        self._pages[page_id] = _pack(location)
        self._live[location.segment] += 1
        self._live_bytes[location.segment] += location.size
        self.used_bytes += location.size

    def add_tombstone(self, page_id: PageId, segment: int) -> None:
        """Remove a deleted page; its tombstone record is in `segment`."""
        self._remove(page_id)
        self._clear_tombstone(page_id)
        if self._dead_copies[page_id]:
            self._tombstone_segments[page_id] = segment
            self._update_tombstone(page_id)

    def mark_damaged(self, page_id: PageId, location: RecordLocation) -> None:
        """Record that a page's record was found damaged, unless another one is valid by now."""
        if self.get(page_id) == location:
            self._damaged.add(page_id)

    def get(self, page_id: PageId) -> RecordLocation | None:
        """Location of a page's valid record, damaged or not."""
        packed = self._pages.get(page_id)
        return None if packed is None else _unpack(packed)

    def has_intact(self, page_id: PageId) -> bool:
        """Return whether a page has a record that was not found damaged."""
        return page_id in self._pages and page_id not in self._damaged

    def ids(self) -> list[PageId]:
        """Ids of all pages."""
        return list(self._pages)

    def times(self) -> Iterator[tuple[PageId, int]]:
        """Yield all pages, as they are at the call, and when each was written in unix seconds."""
        packed = list(self._pages.values())
        return zip(self.ids(), (each >> _TIME_SHIFT for each in packed), strict=True)

    def locations(self) -> list[tuple[PageId, RecordLocation]]:
        """Locations of the valid records of all pages."""
        return [(page_id, _unpack(packed)) for page_id, packed in self._pages.items()]

    def tombstones_in(self, segment: int) -> list[PageId]:
        """Deleted pages that a restart would bring back without the tombstones of a segment."""
        return list(self._needed_tombstones.get(segment, ()))

    def needed_bytes(self, segment: int) -> int:
        """Bytes of a segment's records that are still needed."""
        tombstones = len(self._needed_tombstones.get(segment, ()))
        return self._live_bytes[segment] + HEADER_BYTES * tombstones

    def is_removable(self, segment: int) -> bool:
        """Return whether a segment may be removed; the caller then calls `remove_segment`."""
        return not self._live.get(segment) and not self._needed_tombstones.get(segment)

    def remove_segment(self, segment: int) -> None:
        """Forget a removed segment and the dead copies in it."""
        for page_id, copies in self._dead.pop(segment, Counter()).items():
            self._dead_copies[page_id] -= copies
            if self._dead_copies[page_id]:
                self._update_tombstone(page_id)
            else:
                del self._dead_copies[page_id]
                self._clear_tombstone(page_id)
        self._live.pop(segment, None)
        self._live_bytes.pop(segment, None)
        self._needed_tombstones.pop(segment, None)

    def check(self) -> None:
        """Raise InvariantError when the accounting disagrees with the pages."""
        located = [location for _, location in self.locations()]
        live = Counter(location.segment for location in located)
        if live != +self._live:
            raise InvariantError(
                f"live pages per segment are {dict(live)}, accounted {dict(self._live)}"
            )
        total = sum(location.size for location in located)
        if total != self.used_bytes or total != sum(self._live_bytes.values()):
            raise InvariantError(f"live pages take {total} bytes, accounted {self.used_bytes}")
        if not self._damaged <= self._pages.keys():
            raise InvariantError(f"damaged pages are not there: {self._damaged - set(self._pages)}")
        needed = {
            (segment, page_id)
            for page_id, segment in self._tombstone_segments.items()
            if self._is_needed(page_id, segment)
        }
        counted = {
            (segment, page_id)
            for segment, ids in self._needed_tombstones.items()
            for page_id in ids
        }
        if needed != counted:
            raise InvariantError(f"needed tombstones are {needed}, accounted {counted}")
        dead = sum(self._dead.values(), Counter[PageId]())
        if dead != +self._dead_copies:
            raise InvariantError(
                f"dead copies are {dict(dead)}, accounted {dict(self._dead_copies)}"
            )

    def _remove(self, page_id: PageId) -> None:
        """Count a page's valid record, if it has one, as a dead copy."""
        packed = self._pages.pop(page_id, None)
        if packed is None:
            return
        location = _unpack(packed)
        self._damaged.discard(page_id)
        self._live[location.segment] -= 1
        self._live_bytes[location.segment] -= location.size
        self.used_bytes -= location.size
        self._dead.setdefault(location.segment, Counter())[page_id] += 1
        self._dead_copies[page_id] += 1
        self._update_tombstone(page_id)

    def _update_tombstone(self, page_id: PageId) -> None:
        """Count a page's tombstone as needed while another segment has a dead copy of the page."""
        segment = self._tombstone_segments.get(page_id)
        if segment is None:
            return
        needed = self._needed_tombstones.setdefault(segment, set())
        if self._is_needed(page_id, segment):
            needed.add(page_id)
        else:
            needed.discard(page_id)

    def _is_needed(self, page_id: PageId, segment: int) -> bool:
        return self._dead_copies[page_id] != self._dead.get(segment, Counter[PageId]())[page_id]

    def _clear_tombstone(self, page_id: PageId) -> None:
        segment = self._tombstone_segments.pop(page_id, None)
        if segment is not None:
            self._needed_tombstones.get(segment, set()).discard(page_id)


def _pack(location: RecordLocation) -> int:
    packed = location.written_at << _SEGMENT_BITS | location.segment
    packed = packed << _OFFSET_BITS | location.offset
    return packed << _SIZE_BITS | location.size


def _unpack(packed: int) -> RecordLocation:
    size = packed & (1 << _SIZE_BITS) - 1
    packed >>= _SIZE_BITS
    offset = packed & (1 << _OFFSET_BITS) - 1
    packed >>= _OFFSET_BITS
    return RecordLocation(packed & (1 << _SEGMENT_BITS) - 1, offset, size, packed >> _SEGMENT_BITS)
