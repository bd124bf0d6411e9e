"""Which record of a log counts for each page, and which segments hold nothing that counts any more. Pure."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from kvstore.errors import InvariantError
from kvstore.page import PageKey


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
    """

    def __init__(self) -> None:
        self.pages: dict[PageKey, PagePlace] = {}
        self.used_bytes = 0
        self._of_session: dict[str, set[PageKey]] = {}
        self._live: Counter[int] = Counter()
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
        self._live[place.segment] += 1
        self.used_bytes += place.size

    def add_tombstone(self, key: PageKey, segment: int) -> None:
        """A page was deleted; the record that says so is in `segment`."""
        self._remove(key)
        self._clear_tombstone(key)
        if self._dead_copies[key]:
            self._tombstones.setdefault(segment, set()).add(key)
            self._tombstone_of[key] = segment

    def places(self, session: str | None = None) -> list[PagePlace]:
        """Where the newest records of all pages lie, or of those of one session."""
        if session is None:
            return list(self.pages.values())
        return [self.pages[key] for key in self._of_session.get(session, ())]

    def add_damage(self, segment: int, offset: int) -> None:
        """A record at this place cannot be read; it may have superseded any page that is older."""
        self._damaged[segment] = max(offset, self._damaged.get(segment, 0))

    def is_suspect(self, place: PagePlace) -> bool:
        """Whether a record that cannot be read came after this one."""
        return any(place.position < damage for damage in self._damaged.items())

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

    def check(self) -> None:
        """Raise InvariantError when the books disagree with the pages."""
        live = Counter(place.segment for place in self.pages.values())
        if live != +self._live:
            raise InvariantError(f"live pages per segment are {dict(live)}, the books say {dict(self._live)}")
        total = sum(place.size for place in self.pages.values())
        if total != self.used_bytes:
            raise InvariantError(f"live pages take {total} bytes, the books say {self.used_bytes}")
        if set().union(*self._of_session.values()) != self.pages.keys():
            raise InvariantError(f"pages are {sorted(self.pages)}, by session {sorted(self._of_session)} others")
        dead = sum(self._dead.values(), Counter[PageKey]())
        if dead != +self._dead_copies:
            raise InvariantError(f"dead copies are {dict(dead)}, the books say {dict(self._dead_copies)}")

    def _may_go(self, segment: int) -> bool:
        if self._live[segment]:
            return False
        dead_here = self._dead.get(segment, Counter())
        if any(self._dead_copies[key] != dead_here[key] for key in self._tombstones.get(segment, ())):
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
        self._live[place.segment] -= 1
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
