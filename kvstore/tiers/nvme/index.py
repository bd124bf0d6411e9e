"""Which record of a log counts for each page, and which segments hold nothing that counts any more. Pure."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from kvstore.errors import InvariantError
from kvstore.format.page import HEADER_BYTES, PageKey


@dataclass(frozen=True)
class PagePlace:
    """Where a page's record lies. Places compare by age: an older one is less."""

    segment: int
    offset: int
    size: int
    sequence: int

    @property
    def position(self) -> tuple[int, int]:
        """Orders the records of a log by age."""
        return (self.segment, self.offset)


class LogIndex:
    """The newest record of every page in a log of segments, and the books needed to free whole segments.

    A tombstone must outlive every older copy of its page: without it a restart would bring the copy back.

    A record may be written again, at the end of the log, so that its segment can go: until it has gone there are two of
    the same sequence number, and the one that is further behind in the log counts.
    """

    def __init__(self) -> None:
        self.pages: dict[PageKey, PagePlace] = {}
        self.used_bytes = 0
        self._of_session: dict[str, set[PageKey]] = {}
        self._live: dict[int, set[PageKey]] = {}
        self._live_bytes: Counter[int] = Counter()
        self._dead: dict[int, Counter[PageKey]] = {}
        self._dead_copies: Counter[PageKey] = Counter()
        self._tombstones: dict[int, set[PageKey]] = {}
        self._tombstone_of: dict[PageKey, int] = {}
        self._damaged: dict[int, int] = {}

    def add_page(self, key: PageKey, place: PagePlace) -> None:
        """A page was written. The copy with the larger sequence number counts."""
        held = self.pages.get(key)
        if held is not None and held.sequence > place.sequence:
            self._bury(key, place)
            return
        self._remove(key)
        self._clear_tombstone(key)
        self.pages[key] = place
        self._of_session.setdefault(key.session, set()).add(key)
        self._live.setdefault(place.segment, set()).add(key)
        self._live_bytes[place.segment] += place.size
        self.used_bytes += place.size

    def add_tombstone(self, key: PageKey, segment: int) -> None:
        """A page was deleted; the record that says so is in `segment`."""
        self._remove(key)
        self._clear_tombstone(key)
        if self._dead_copies[key]:
            self._tombstones.setdefault(segment, set()).add(key)
            self._tombstone_of[key] = segment

    def places(self, session: str | None = None) -> list[tuple[PageKey, PagePlace]]:
        """Where the newest records of all pages lie, or of those of one session."""
        if session is None:
            return list(self.pages.items())
        return [(key, self.pages[key]) for key in self._of_session.get(session, ())]

    def add_damage(self, segment: int, offset: int) -> None:
        """A record at this place cannot be read; it may have superseded any page that is older."""
        self._damaged[segment] = max(offset, self._damaged.get(segment, 0))

    def is_suspect(self, place: PagePlace) -> bool:
        """Whether a record that cannot be read came after this one."""
        return any(place.position < damage for damage in self._damaged.items())

    def pages_in(self, segment: int) -> list[PageKey]:
        """The pages whose newest record is in a segment."""
        return list(self._live.get(segment, ()))

    def tombstones_in(self, segment: int) -> list[PageKey]:
        """The deleted pages that a restart would bring back if the segment was gone."""
        dead_here = self._dead.get(segment, Counter())
        return [
            key
            for key in self._tombstones.get(segment, ())
            if self._dead_copies[key] != dead_here[key]
        ]

    def needed_bytes(self, segment: int) -> int:
        """Bytes of the records in a segment that still count."""
        return self._live_bytes[segment] + HEADER_BYTES * len(self.tombstones_in(segment))

    def may_move(self, segment: int) -> bool:
        """Whether records of the segment may be written again: behind damage they would no longer be suspect."""
        return segment > max(self._damaged, default=0)

    def removable(self, segments: list[int]) -> Iterator[int]:
        """Of `segments`, in ascending order, those that may go; the caller removes each and calls `forget`."""
        for segment in segments:
            if self._may_go(segment):
                yield segment

    def forget(self, segment: int) -> None:
        """The segment's file is gone, and the dead copies in it."""
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
        """Raise InvariantError when the books disagree with the pages."""
        live = Counter(place.segment for place in self.pages.values())
        known = Counter({segment: len(keys) for segment, keys in self._live.items()})
        if live != +known:
            raise InvariantError(
                f"live pages per segment are {dict(live)}, the books say {dict(known)}"
            )
        total = sum(place.size for place in self.pages.values())
        if total != self.used_bytes or total != sum(self._live_bytes.values()):
            raise InvariantError(f"live pages take {total} bytes, the books say {self.used_bytes}")
        if set().union(*self._of_session.values()) != self.pages.keys():
            raise InvariantError(
                f"pages are {sorted(self.pages)}, by session {sorted(self._of_session)} others"
            )
        dead = sum(self._dead.values(), Counter[PageKey]())
        if dead != +self._dead_copies:
            raise InvariantError(
                f"dead copies are {dict(dead)}, the books say {dict(self._dead_copies)}"
            )

    def _may_go(self, segment: int) -> bool:
        if self._live.get(segment) or self.tombstones_in(segment):
            return False
        if segment not in self._damaged:
            return True
        damage = (segment, self._damaged[segment])
        return all(place.position > damage for place in self.pages.values())

    def _remove(self, key: PageKey) -> None:
        place = self.pages.pop(key, None)
        if place is None:
            return
        self._leave_session(key)
        self._live[place.segment].remove(key)
        self._live_bytes[place.segment] -= place.size
        self.used_bytes -= place.size
        self._bury(key, place)

    def _leave_session(self, key: PageKey) -> None:
        of_session = self._of_session[key.session]
        of_session.remove(key)
        if not of_session:
            del self._of_session[key.session]

    def _bury(self, key: PageKey, place: PagePlace) -> None:
        self._dead.setdefault(place.segment, Counter())[key] += 1
        self._dead_copies[key] += 1

    def _clear_tombstone(self, key: PageKey) -> None:
        segment = self._tombstone_of.pop(key, None)
        if segment is not None:
            self._tombstones[segment].discard(key)
