"""Pages in this process's memory, under a byte limit; the coldest leave first."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from threading import Lock

from kvstore.errors import InvariantError, StoreClosedError, TierFullError
from kvstore.page import Blob, PageHeader, PageKey, parse_header


@dataclass(frozen=True)
class _Held:
    blob: bytearray
    backed: bool
    sequence: int


class RamTier:
    """A Tier in host memory. Only pages that a lower tier holds too may be dropped to make room."""

    def __init__(self, limit_bytes: int, name: str = "ram") -> None:
        self._limit_bytes = limit_bytes
        self._name = name
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

    def put(self, pages: Sequence[tuple[PageKey, Blob]], *, backed: bool = False, epoch: int | None = None) -> None:
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
                raise InvariantError(f"tier {self._name}: holds {total} bytes, its books say {self._used_bytes}, "
                                     f"its limit is {self._limit_bytes}")  # fmt: skip

    def close(self) -> None:
        with self._lock:
            self._backed.clear()
            self._only_here.clear()
            self._used_bytes = self._backed_bytes = 0
            self._closed = True

    def _put_one(self, key: PageKey, blob: Blob, backed: bool) -> None:
        sequence = parse_header(blob).sequence
        held = self._find(key)
        if held is not None and held.sequence > sequence:
            return
        self._make_room(len(blob), key)
        self._remove(key)
        page = _Held(bytearray(blob), backed, sequence)
        (self._backed if backed else self._only_here)[key] = page
        self._count(page, 1)

    def _make_room(self, wanted: int, replaced: PageKey) -> None:
        """Drop the coldest backed pages until `wanted` bytes fit in place of page `replaced`; or drop nothing."""
        held = self._find(replaced)
        replaced_bytes = len(held.blob) if held is not None else 0
        kept_bytes = self._used_bytes - self._backed_bytes
        if held is not None and not held.backed:
            kept_bytes -= replaced_bytes
        free = self._limit_bytes - self._used_bytes + replaced_bytes
        if wanted > self._limit_bytes - kept_bytes:
            raise TierFullError(f"tier {self._name}: {wanted} bytes do not fit ({self._used_bytes} of "
                                f"{self._limit_bytes} in use, none that a lower tier holds too); raise its limit, "
                                "drop sessions or add a lower tier")  # fmt: skip
        while wanted > free:
            coldest = next(key for key in self._backed if key != replaced)
            free += len(self._remove(coldest))

    def _touch(self, key: PageKey) -> bytearray | None:
        held = self._find(key)
        if held is None:
            return None
        if held.backed:
            self._backed.move_to_end(key)
        return held.blob

    def _find(self, key: PageKey) -> _Held | None:
        return self._backed.get(key) or self._only_here.get(key)

    def _remove(self, key: PageKey) -> bytearray:
        held = self._backed.pop(key, None) or self._only_here.pop(key, None)
        if held is None:
            return bytearray()
        self._count(held, -1)
        return held.blob

    def _count(self, page: _Held, sign: int) -> None:
        self._used_bytes += sign * len(page.blob)
        if page.backed:
            self._backed_bytes += sign * len(page.blob)

    def _require_open(self) -> None:
        if self._closed:
            raise StoreClosedError(f"tier {self._name} is closed")
