"""Pages in this process's memory, under a byte limit; the coldest leave first.

A page is copied once, when it is put. `get` copies nothing: it hands out the page's place in the arena, which is not
used again before the page was dropped and nobody refers to what was handed out.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from threading import Lock

import numpy as np

from kvstore.errors import InvariantError, StoreClosedError, TierFullError
from kvstore.format.page import Blob, PageHeader, PageKey, parse_header, sequence_of
from kvstore.tiers.arena import Arena


@dataclass(frozen=True)
class _Held:
    blob: memoryview
    backed: bool
    sequence: int


class RamTier:
    """A Tier in host memory. Only pages that a lower tier holds too may be dropped to make room.

    Pages that are being read when they are dropped, and pages that are only here and find the free room in pieces, take
    memory beside the limit for as long as that lasts. Raises TierSettingsError when there is not so much memory.
    """

    def __init__(self, limit_bytes: int, name: str = "ram") -> None:
        self._limit_bytes = limit_bytes
        self._name = name
        self._arena = Arena(limit_bytes, pinned=True)
        # Coldest first. Two maps, so that finding a page that may be dropped never walks over those that may not.
        self._backed: OrderedDict[PageKey, _Held] = OrderedDict()
        self._only_here: dict[PageKey, _Held] = {}
        self._used_bytes = 0
        self._backed_bytes = 0
        self._closed = False
        self._lock = Lock()

    @property
    def name(self) -> str:
        return self._name

    @property
    def durable(self) -> bool:
        return False

    @property
    def shared(self) -> bool:
        return False

    @property
    def limit_bytes(self) -> int:
        """The most bytes of pages it ever holds."""
        return self._limit_bytes

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def fence(self, session: str, epoch: int) -> None:
        """Nobody else can write here."""

    def get(self, keys: Sequence[PageKey]) -> list[Blob | None]:
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
        with self._lock:
            self._require_open()
            for key, blob in pages:
                self._put_one(key, blob, backed)

    def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        with self._lock:
            return [self._find(key) is not None for key in keys]

    def delete(self, keys: Sequence[PageKey], *, epoch: int | None = None) -> None:
        with self._lock:
            self._require_open()
            for key in keys:
                self._remove(key)

    def stored(self, session: str | None = None) -> Iterator[PageHeader]:
        with self._lock:
            held = [*self._backed.items(), *self._only_here.items()]
        return (parse_header(page.blob) for key, page in held if session in (None, key.session))

    def flush(self) -> None:
        with self._lock:
            self._require_open()

    def check(self) -> None:
        with self._lock:
            held = [*self._backed.values(), *self._only_here.values()]
            total = sum(len(page.blob) for page in held)
            if total != self._used_bytes or total > self._limit_bytes:
                raise InvariantError(
                    f"tier {self._name}: holds {total} bytes, its books say {self._used_bytes}, "
                    f"its limit is {self._limit_bytes}"
                )

    def close(self) -> None:
        with self._lock:
            self._arena = Arena(0)
            self._backed.clear()
            self._only_here.clear()
            self._used_bytes = self._backed_bytes = 0
            self._closed = True

    def _put_one(self, key: PageKey, blob: Blob, backed: bool) -> None:
        sequence = sequence_of(blob)
        held = self._find(key)
        if held is not None and held.sequence > sequence:
            return
        self._require_room(len(blob), held)
        self._remove(key)
        page = _Held(self._copied(blob), backed, sequence)
        (self._backed if backed else self._only_here)[key] = page
        self._count(page, 1)

    def _require_room(self, wanted: int, replaced: _Held | None) -> None:
        """Raise TierFullError, before anything was dropped, unless `wanted` bytes fit instead of a page."""
        kept_bytes = self._used_bytes - self._backed_bytes
        if replaced is not None and not replaced.backed:
            kept_bytes -= len(replaced.blob)
        if wanted > self._limit_bytes - kept_bytes:
            raise TierFullError(
                f"tier {self._name}: {wanted} bytes do not fit ({self._used_bytes} of "
                f"{self._limit_bytes} in use, none that a lower tier holds too); raise its limit, "
                "drop sessions or add a lower tier"
            )

    def _copied(self, blob: Blob) -> memoryview:
        """A page's place in the arena, with the page in it; the coldest backed pages go until there is one."""
        while self._used_bytes + len(blob) > self._limit_bytes:
            self._drop_coldest()
        while (part := self._arena.lend(len(blob))) is None and self._backed:
            self._drop_coldest()
        if part is None:
            part = np.empty(len(blob), dtype=np.uint8)
        part[:] = np.frombuffer(blob, dtype=np.uint8)
        return part.data

    def _drop_coldest(self) -> None:
        self._remove(next(iter(self._backed)))

    def _touch(self, key: PageKey) -> memoryview | None:
        held = self._find(key)
        if held is None:
            return None
        if held.backed:
            self._backed.move_to_end(key)
        return held.blob

    def _find(self, key: PageKey) -> _Held | None:
        return self._backed.get(key) or self._only_here.get(key)

    def _remove(self, key: PageKey) -> None:
        held = self._backed.pop(key, None) or self._only_here.pop(key, None)
        if held is not None:
            self._count(held, -1)

    def _count(self, page: _Held, sign: int) -> None:
        self._used_bytes += sign * len(page.blob)
        if page.backed:
            self._backed_bytes += sign * len(page.blob)

    def _require_open(self) -> None:
        if self._closed:
            raise StoreClosedError(f"tier {self._name} is closed")
