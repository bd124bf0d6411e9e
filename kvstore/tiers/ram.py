"""Tier in host memory under a byte limit; the coldest pages are dropped first.

A page is copied once, when it is put. `get` returns a view of the arena without copying; the memory
is reused only after the page was dropped and nothing refers to the view any more.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from threading import Lock

import numpy as np

from kvstore.errors import InvariantError, StoreClosedError, TierFullError
from kvstore.format.page import Blob, PageHeader, PageKey, parse_header, read_sequence
from kvstore.tiers.arena import Arena
from kvstore.tiers.base import one_per_session

# Pages that are dropped for one, where the free memory is in pieces: that of pages which are still
# read does not come free.
_MOST_DROPPED = 4


@dataclass(frozen=True)
class _Resident:
    blob: memoryview
    backed: bool
    sequence: int


class RamTier:
    """A Tier in host memory; only pages that a lower tier holds too are dropped to make room.

    Memory beyond the limit is used while dropped pages are still being read, and for unbacked
    pages when the free memory is fragmented. Raises TierSettingsError when the memory cannot be
    allocated.
    """

    durable = False
    shared = False

    def __init__(self, limit_bytes: int, name: str = "ram") -> None:
        self.name = name
        self.limit_bytes = limit_bytes
        self._arena = Arena(limit_bytes, pinned=True)
        # Coldest first. Two maps, so that the search for a page to drop skips the unbacked ones.
        self._backed: OrderedDict[PageKey, _Resident] = OrderedDict()
        self._unbacked: dict[PageKey, _Resident] = {}
        self._used_bytes = 0
        self._backed_bytes = 0
        self._closed = False
        self._lock = Lock()

    @property
    def used_bytes(self) -> int:
        """Bytes of the resident pages, headers included."""
        return self._used_bytes

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
        """Copy pages into the arena, dropping the coldest backed pages if necessary.

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
            resident = [*self._backed.items(), *self._unbacked.items()]
        return (parse_header(page.blob) for key, page in resident if session in (None, key.session))

    def session_headers(self) -> Iterator[PageHeader]:
        """Return one header per session, of any of its pages."""
        return one_per_session(self.stored())

    def flush(self) -> None:
        """Do nothing: memory is never durable."""
        with self._lock:
            self._require_open()

    def check(self) -> None:
        """Raise InvariantError when the used bytes disagree with the resident pages."""
        with self._lock:
            resident = [*self._backed.values(), *self._unbacked.values()]
            total = sum(len(page.blob) for page in resident)
            if total != self._used_bytes or total > self.limit_bytes:
                raise InvariantError(
                    f"tier {self.name}: holds {total} bytes, accounted {self._used_bytes}, "
                    f"limit {self.limit_bytes}"
                )

    def close(self) -> None:
        """Free the memory. May be called twice."""
        with self._lock:
            self._arena = Arena(0)
            self._backed.clear()
            self._unbacked.clear()
            self._used_bytes = 0
            self._backed_bytes = 0
            self._closed = True

    def _put_one(self, key: PageKey, blob: Blob, backed: bool) -> None:
        sequence = read_sequence(blob)
        resident = self._find(key)
        if resident is not None and resident.sequence > sequence:
            return
        self._require_room(len(blob), resident)
        self._remove(key)
        page = _Resident(self._copy_in(blob), backed, sequence)
        (self._backed if backed else self._unbacked)[key] = page
        self._count(page, 1)

    def _require_room(self, needed: int, replaced: _Resident | None) -> None:
        """Raise TierFullError, before anything is dropped, unless `needed` bytes can fit."""
        unbacked_bytes = self._used_bytes - self._backed_bytes
        if replaced is not None and not replaced.backed:
            unbacked_bytes -= len(replaced.blob)
        if needed > self.limit_bytes - unbacked_bytes:
            raise TierFullError(
                f"tier {self.name}: {needed} bytes do not fit, {unbacked_bytes} of "
                f"{self.limit_bytes} are in use by pages that no lower tier holds; raise its "
                "limit, delete sessions or add a lower tier"
            )

    def _copy_in(self, blob: Blob) -> memoryview:
        """Copy a page into the arena, dropping the coldest backed pages until it fits."""
        while self._used_bytes + len(blob) > self.limit_bytes:
            self._drop_coldest()
        dropped = 0
        while (part := self._arena.allocate(len(blob))) is None and dropped < _MOST_DROPPED:
            if not self._backed:
                break
            self._drop_coldest()
            dropped += 1
        if part is None:
            part = np.empty(len(blob), dtype=np.uint8)
        part[:] = np.frombuffer(blob, dtype=np.uint8)
        return part.data

    def _drop_coldest(self) -> None:
        self._remove(next(iter(self._backed)))

    def _touch(self, key: PageKey) -> memoryview | None:
        resident = self._find(key)
        if resident is None:
            return None
        if resident.backed:
            self._backed.move_to_end(key)
        return resident.blob

    def _find(self, key: PageKey) -> _Resident | None:
        return self._backed.get(key) or self._unbacked.get(key)

    def _remove(self, key: PageKey) -> None:
        resident = self._backed.pop(key, None) or self._unbacked.pop(key, None)
        if resident is not None:
            self._count(resident, -1)

    def _count(self, page: _Resident, sign: int) -> None:
        self._used_bytes += sign * len(page.blob)
        if page.backed:
            self._backed_bytes += sign * len(page.blob)

    def _require_open(self) -> None:
        if self._closed:
            raise StoreClosedError(f"tier {self.name} is closed")
