"""Index of a segment log: the valid record of each page, and the segments that may be removed."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from kvstore.errors import InvariantError
from kvstore.format.page import HEADER_BYTES, PageKey

# Bits of a packed location: sequence, segment, offset, size.
_SEGMENT_BITS, _OFFSET_BITS, _SIZE_BITS = 32, 40, 32
_SEQUENCE_SHIFT = _SEGMENT_BITS + _OFFSET_BITS + _SIZE_BITS


@dataclass(frozen=True, slots=True)
class RecordLocation:
    """Location, size in bytes and sequence number of a page's record."""

    segment: int
    offset: int
    size: int
    sequence: int

    @property
    def position(self) -> tuple[int, int]:
        """Position in the log; orders records by age, oldest first."""
        return (self.segment, self.offset)


class LogIndex:
    """Newest record of every page in a log of segments, and the accounting to free segments.

    A tombstone must outlive every older copy of its page; without it a restart would bring the
    copy back.

    Compaction writes a record again at the end of the log, so that its segment can be removed.
    Until then there are two copies with the same sequence number, and the later one in the log is
    valid.

    A page takes about 150 bytes of memory: its location is packed into one integer.
    """

    def __init__(self) -> None:
        self.used_bytes = 0
        self._sessions: dict[str, dict[int, int]] = {}
        self._live: Counter[int] = Counter()
        self._live_bytes: Counter[int] = Counter()
        self._dead: dict[int, Counter[PageKey]] = {}
        self._dead_copies: Counter[PageKey] = Counter()
        self._tombstone_segments: dict[PageKey, int] = {}
        # Of these, by segment, the ones that a restart needs: counted when something changes, since
        # every flush asks for them.
        self._needed_tombstones: dict[int, set[PageKey]] = {}
        self._damaged: dict[int, int] = {}

    def add_page(self, key: PageKey, location: RecordLocation) -> None:
        """Add a written page; of two copies the one with the larger sequence number is valid."""
        current = self.get(key)
        if current is not None and current.sequence > location.sequence:
            self._count_dead(key, location)
            return
        self._remove(key, current)
        self._clear_tombstone(key)
        self._sessions.setdefault(key.session, {})[key.index] = _pack(location)
        self._live[location.segment] += 1
        self._live_bytes[location.segment] += location.size
        self.used_bytes += location.size

    def add_tombstone(self, key: PageKey, segment: int) -> None:
        """Remove a deleted page; its tombstone record is in `segment`."""
        self._remove(key, self.get(key))
        self._clear_tombstone(key)
        if self._dead_copies[key]:
            self._tombstone_segments[key] = segment
            self._update_tombstone(key)

    def get(self, key: PageKey) -> RecordLocation | None:
        """Location of a page's valid record."""
        packed = self._sessions.get(key.session, {}).get(key.index)
        return None if packed is None else _unpack(packed)

    def locations(self, session: str | None = None) -> list[tuple[PageKey, RecordLocation]]:
        """Locations of the valid records of all pages, or of those of one session."""
        return [
            (PageKey(name, index), _unpack(packed))
            for name in (self._sessions if session is None else [session])
            for index, packed in self._sessions.get(name, {}).items()
        ]

    def one_per_session(self) -> list[tuple[PageKey, RecordLocation]]:
        """Location of any one page of each session."""
        first = ((name, *next(iter(pages.items()))) for name, pages in self._sessions.items())
        return [(PageKey(name, index), _unpack(packed)) for name, index, packed in first]

    def add_damage(self, segment: int, offset: int) -> None:
        """Record an unreadable stretch; it may have superseded any older page."""
        self._damaged[segment] = max(offset, self._damaged.get(segment, 0))

    def is_suspect(self, location: RecordLocation) -> bool:
        """Return whether an unreadable record follows this one."""
        return any(location.position < damage for damage in self._damaged.items())

    def tombstones_in(self, segment: int) -> list[PageKey]:
        """Deleted pages that a restart would bring back without the tombstones of a segment."""
        return list(self._needed_tombstones.get(segment, ()))

    def needed_bytes(self, segment: int) -> int:
        """Bytes of a segment's records that are still needed."""
        tombstones = len(self._needed_tombstones.get(segment, ()))
        return self._live_bytes[segment] + HEADER_BYTES * tombstones

    def may_move(self, segment: int) -> bool:
        """Return whether records may be moved: behind damage they would stop being suspect."""
        return segment > max(self._damaged, default=0)

    def removable(self, segments: list[int]) -> Iterator[int]:
        """Yield those of the ascending `segments` that may be removed.

        The caller removes each file and calls `remove_segment`.
        """
        for segment in segments:
            if self._is_removable(segment):
                yield segment

    def remove_segment(self, segment: int) -> None:
        """Forget a removed segment and the dead copies in it."""
        for key, copies in self._dead.pop(segment, Counter()).items():
            self._dead_copies[key] -= copies
            if self._dead_copies[key]:
                self._update_tombstone(key)
            else:
                del self._dead_copies[key]
                self._clear_tombstone(key)
        self._damaged.pop(segment, None)
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
        needed = {
            (segment, key)
            for key, segment in self._tombstone_segments.items()
            if self._is_needed(key, segment)
        }
        counted = {
            (segment, key) for segment, keys in self._needed_tombstones.items() for key in keys
        }
        if needed != counted:
            raise InvariantError(f"needed tombstones are {needed}, accounted {counted}")
        dead = sum(self._dead.values(), Counter[PageKey]())
        if dead != +self._dead_copies:
            raise InvariantError(
                f"dead copies are {dict(dead)}, accounted {dict(self._dead_copies)}"
            )

    def _is_removable(self, segment: int) -> bool:
        if self._live.get(segment) or self._needed_tombstones.get(segment):
            return False
        if segment not in self._damaged:
            return True
        damage = (segment, self._damaged[segment])
        return all(location.position > damage for _, location in self.locations())

    def _remove(self, key: PageKey, location: RecordLocation | None) -> None:
        if location is None:
            return
        pages = self._sessions[key.session]
        del pages[key.index]
        if not pages:
            del self._sessions[key.session]
        self._live[location.segment] -= 1
        self._live_bytes[location.segment] -= location.size
        self.used_bytes -= location.size
        self._count_dead(key, location)

    def _count_dead(self, key: PageKey, location: RecordLocation) -> None:
        self._dead.setdefault(location.segment, Counter())[key] += 1
        self._dead_copies[key] += 1
        self._update_tombstone(key)

    def _update_tombstone(self, key: PageKey) -> None:
        """Count a page's tombstone as needed while another segment has a dead copy of the page."""
        segment = self._tombstone_segments.get(key)
        if segment is None:
            return
        needed = self._needed_tombstones.setdefault(segment, set())
        if self._is_needed(key, segment):
            needed.add(key)
        else:
            needed.discard(key)

    def _is_needed(self, key: PageKey, segment: int) -> bool:
        return self._dead_copies[key] != self._dead.get(segment, Counter[PageKey]())[key]

    def _clear_tombstone(self, key: PageKey) -> None:
        segment = self._tombstone_segments.pop(key, None)
        if segment is not None:
            self._needed_tombstones.get(segment, set()).discard(key)


def _pack(location: RecordLocation) -> int:
    packed = location.sequence << _SEGMENT_BITS | location.segment
    packed = packed << _OFFSET_BITS | location.offset
    return packed << _SIZE_BITS | location.size


def _unpack(packed: int) -> RecordLocation:
    size = packed & (1 << _SIZE_BITS) - 1
    packed >>= _SIZE_BITS
    offset = packed & (1 << _OFFSET_BITS) - 1
    packed >>= _OFFSET_BITS
    return RecordLocation(packed & (1 << _SEGMENT_BITS) - 1, offset, size, packed >> _SEGMENT_BITS)
