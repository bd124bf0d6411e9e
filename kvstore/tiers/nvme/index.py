"""Index of a segment log: the valid record of each page, and the segments that may be removed."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from kvstore.errors import InvariantError
from kvstore.format.page import HEADER_BYTES, PageKey


@dataclass(frozen=True)
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
    """

    def __init__(self) -> None:
        self.pages: dict[PageKey, RecordLocation] = {}
        self.used_bytes = 0
        self._by_session: dict[str, set[PageKey]] = {}
        self._live: dict[int, set[PageKey]] = {}
        self._live_bytes: Counter[int] = Counter()
        self._dead: dict[int, Counter[PageKey]] = {}
        self._dead_copies: Counter[PageKey] = Counter()
        self._tombstones: dict[int, set[PageKey]] = {}
        self._tombstone_segments: dict[PageKey, int] = {}
        self._damaged: dict[int, int] = {}

    def add_page(self, key: PageKey, location: RecordLocation) -> None:
        """Add a written page; of two copies the one with the larger sequence number is valid."""
        current = self.pages.get(key)
        if current is not None and current.sequence > location.sequence:
            self._count_dead(key, location)
            return
        self._remove(key)
        self._clear_tombstone(key)
        self.pages[key] = location
        self._by_session.setdefault(key.session, set()).add(key)
        self._live.setdefault(location.segment, set()).add(key)
        self._live_bytes[location.segment] += location.size
        self.used_bytes += location.size

    def add_tombstone(self, key: PageKey, segment: int) -> None:
        """Remove a deleted page; its tombstone record is in `segment`."""
        self._remove(key)
        self._clear_tombstone(key)
        if self._dead_copies[key]:
            self._tombstones.setdefault(segment, set()).add(key)
            self._tombstone_segments[key] = segment

    def locations(self, session: str | None = None) -> list[tuple[PageKey, RecordLocation]]:
        """Locations of the valid records of all pages, or of those of one session."""
        if session is None:
            return list(self.pages.items())
        return [(key, self.pages[key]) for key in self._by_session.get(session, ())]

    def add_damage(self, segment: int, offset: int) -> None:
        """Record an unreadable stretch; it may have superseded any older page."""
        self._damaged[segment] = max(offset, self._damaged.get(segment, 0))

    def is_suspect(self, location: RecordLocation) -> bool:
        """Return whether an unreadable record follows this one."""
        return any(location.position < damage for damage in self._damaged.items())

    def pages_in(self, segment: int) -> list[PageKey]:
        """Pages whose valid record is in a segment."""
        return list(self._live.get(segment, ()))

    def tombstones_in(self, segment: int) -> list[PageKey]:
        """Deleted pages that a restart would bring back without the tombstones of a segment."""
        dead_here = self._dead.get(segment, Counter())
        return [
            key
            for key in self._tombstones.get(segment, ())
            if self._dead_copies[key] != dead_here[key]
        ]

    def needed_bytes(self, segment: int) -> int:
        """Bytes of a segment's records that are still needed."""
        return self._live_bytes[segment] + HEADER_BYTES * len(self.tombstones_in(segment))

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
            if not self._dead_copies[key]:
                del self._dead_copies[key]
                self._clear_tombstone(key)
        self._damaged.pop(segment, None)
        self._live.pop(segment, None)
        self._live_bytes.pop(segment, None)
        self._tombstones.pop(segment, None)

    def check(self) -> None:
        """Raise InvariantError when the accounting disagrees with the pages."""
        live = Counter(location.segment for location in self.pages.values())
        known = Counter({segment: len(keys) for segment, keys in self._live.items()})
        if live != +known:
            raise InvariantError(
                f"live pages per segment are {dict(live)}, accounted {dict(known)}"
            )
        total = sum(location.size for location in self.pages.values())
        if total != self.used_bytes or total != sum(self._live_bytes.values()):
            raise InvariantError(f"live pages take {total} bytes, accounted {self.used_bytes}")
        if set().union(*self._by_session.values()) != self.pages.keys():
            raise InvariantError(
                f"pages are {sorted(self.pages)}, accounted others in {sorted(self._by_session)}"
            )
        dead = sum(self._dead.values(), Counter[PageKey]())
        if dead != +self._dead_copies:
            raise InvariantError(
                f"dead copies are {dict(dead)}, accounted {dict(self._dead_copies)}"
            )

    def _is_removable(self, segment: int) -> bool:
        if self._live.get(segment) or self.tombstones_in(segment):
            return False
        if segment not in self._damaged:
            return True
        damage = (segment, self._damaged[segment])
        return all(location.position > damage for location in self.pages.values())

    def _remove(self, key: PageKey) -> None:
        location = self.pages.pop(key, None)
        if location is None:
            return
        self._remove_from_session(key)
        self._live[location.segment].remove(key)
        self._live_bytes[location.segment] -= location.size
        self.used_bytes -= location.size
        self._count_dead(key, location)

    def _remove_from_session(self, key: PageKey) -> None:
        keys = self._by_session[key.session]
        keys.remove(key)
        if not keys:
            del self._by_session[key.session]

    def _count_dead(self, key: PageKey, location: RecordLocation) -> None:
        self._dead.setdefault(location.segment, Counter())[key] += 1
        self._dead_copies[key] += 1

    def _clear_tombstone(self, key: PageKey) -> None:
        segment = self._tombstone_segments.pop(key, None)
        if segment is not None:
            self._tombstones[segment].discard(key)
