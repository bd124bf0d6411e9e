"""Pages in append-only segment files of one directory.

Every page is one write at the end of the newest segment and one read from where it lies. Deleting appends a tombstone.
A thread of the tier's own moves what still counts out of segments of mostly dead records, so that these can go.
"""

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Event, Lock, Thread

from kvstore.errors import StoreClosedError, TierError, TierFullError
from kvstore.format.page import Blob, PageHeader, PageKey, RecordCheck
from kvstore.tiers.arena import Buffers
from kvstore.tiers.nvme.segment import reported
from kvstore.tiers.nvme.segment_log import Located, SegmentLog

SEGMENT_BYTES = 64 << 20
RESERVE_BYTES = 64 << 20
_SMALL_SHARE = 8
DEAD_SHARE = 0.5
"""Of a segment, from which on the rest is moved: then moving writes no byte more than it frees."""
_DEAD_SHARE_WHEN_FULL = 0.2
_PIECE_BYTES = 1 << 20
"""Read at a time, so that the checksum finds it in the processor's cache."""

_BUFFER_BYTES = 1 << 27
"""Of memory that pages are read into, again and again: it costs less than new memory."""


class NvmeTier:
    """A durable Tier on a local file system. One process at a time owns the directory.

    `limit_bytes` bounds the files' bytes, records that no longer count included; tombstones, and moving at most a
    segment's records out of it, may exceed it. Pages leave `reserve_bytes` of the file system free, by default
    `RESERVE_BYTES` but an eighth of a small one: for the catalog that may lie there too, for tombstones and, half of
    it, for moving, so that a full disk can be emptied by deleting sessions. With `compact_in_background` False records
    are moved only when there is no room. Raises DirectoryLockedError when the directory has an owner.
    """

    def __init__(
        self,
        directory: Path,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        limit_bytes: int | None = None,
        reserve_bytes: int | None = None,
        name: str = "nvme",
        compact_in_background: bool = True,
    ) -> None:
        self._directory = directory
        self._limit_bytes = limit_bytes
        self._reserve_bytes = reserve_bytes
        self._name = name
        self._log = SegmentLog(directory, segment_bytes, name)
        self._buffers = Buffers(_BUFFER_BYTES)
        self._writing = Lock()
        self._changed = Event()
        self._closing = Event()
        self._compaction: Thread | None = None
        if compact_in_background:
            self._changed.set()
            self._compaction = Thread(
                target=self._compact, name="kvstore-nvme-compaction", daemon=True
            )
            self._compaction.start()

    @property
    def name(self) -> str:
        return self._name

    @property
    def durable(self) -> bool:
        return True

    @property
    def shared(self) -> bool:
        return False

    @property
    def used_bytes(self) -> int:
        return self._log.used_bytes

    @property
    def limit_bytes(self) -> int | None:
        return self._limit_bytes

    @property
    def file_bytes(self) -> int:
        """Bytes of the segment files, records that no longer count included."""
        return self._log.file_bytes

    def fence(self, session: str, epoch: int) -> None:
        """Nobody else can write here: the directory has one owner."""

    def get(self, keys: Sequence[PageKey]) -> list[Blob | None]:
        located = self._log.locate(keys)
        # One after the other: reading several at once, or asking the kernel to read ahead, was slower from a disk.
        return [
            None if at is None else self._read(key, at)
            for key, at in zip(keys, located, strict=True)
        ]

    def put(
        self,
        pages: Sequence[tuple[PageKey, Blob]],
        *,
        backed: bool = False,
        epoch: int | None = None,
    ) -> None:
        with self._writing:
            for key, blob in pages:
                self._make_room(len(blob))
                self._log.append_page(key, blob)

    def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        return self._log.contains(keys)

    def delete(self, keys: Sequence[PageKey], *, epoch: int | None = None) -> None:
        if self._log.append_tombstones(keys):
            self.flush()

    def stored(self, session: str | None = None) -> Iterator[PageHeader]:
        return iter(self._log.headers(session))

    def flush(self) -> None:
        self._log.flush()
        self._changed.set()

    def compact(self, dead_share: float = DEAD_SHARE) -> Iterator[int]:
        """Move records out of segments of which so much is dead, one at each step, which is its bytes."""
        while (number := self._log.worth_moving(dead_share, self._room_to_move())) is not None:
            yield from self._log.moves(number)

    def check(self) -> None:
        self._log.check()

    def close(self) -> None:
        self._closing.set()
        self._changed.set()
        if self._compaction is not None:
            self._compaction.join()
        self._log.close()

    def _read(self, key: PageKey, at: Located) -> memoryview:
        """A page, verified while it is read. Raises CorruptPageError."""
        place, segment = at
        record = self._buffers.lend(place.size)
        check = RecordCheck()
        for first in range(0, place.size, _PIECE_BYTES):
            check.add(segment.read_into(record[first : first + _PIECE_BYTES], place.offset + first))
        check.require(key, place.sequence)
        return record

    def _make_room(self, wanted: int) -> None:
        """Raise TierFullError unless limit and disk leave so many bytes, if need be after a compaction."""
        while (why := self._no_room_for(wanted)) is not None:
            never = self._limit_bytes is not None and self.used_bytes + wanted > self._limit_bytes
            if never or not self._compact_now():
                raise TierFullError(f"tier {self._name}: {wanted} bytes do not fit, {why}")

    def _no_room_for(self, wanted: int) -> str | None:
        """Why so many bytes do not fit now; None if they do."""
        if self._limit_bytes is not None and self.file_bytes + wanted > self._limit_bytes:
            return (
                f"{self.file_bytes} of {self._limit_bytes} in use; raise its limit or drop sessions"
            )
        free, reserve = self._free_and_reserve()
        if free - wanted < reserve:
            return f"{free} are free on the disk, {reserve} of them kept for other needs; free some or drop sessions"
        return None

    def _free_and_reserve(self) -> tuple[int, int]:
        """Bytes of the file system that are free, and that pages leave free. Raises TierFailedError."""
        with reported(self._directory):
            disk = os.statvfs(self._directory)
        small = disk.f_blocks * disk.f_frsize // _SMALL_SHARE
        reserve = min(RESERVE_BYTES, small) if self._reserve_bytes is None else self._reserve_bytes
        return disk.f_bavail * disk.f_frsize, reserve

    def _room_to_move(self) -> int:
        """Bytes that may be written again to empty a segment."""
        free, reserve = self._free_and_reserve()
        return free - reserve // 2

    def _compact_now(self) -> bool:
        """Empty one segment without rest; whether that freed anything."""
        before = self.file_bytes
        room = self._room_to_move()
        number = self._log.worth_moving(_DEAD_SHARE_WHEN_FULL, room)
        if number is None and self._log.seal_newest(_DEAD_SHARE_WHEN_FULL):
            number = self._log.worth_moving(_DEAD_SHARE_WHEN_FULL, room)
        if number is not None:
            for _ in self._log.moves(number):
                pass
        return self.file_bytes < before

    def _compact(self) -> None:
        while self._changed.wait() and not self._closing.is_set():
            self._changed.clear()
            try:
                self._compact_gently()
            except (TierError, StoreClosedError):
                # No room, or the tier has failed: whoever writes to it hears of that. Later there may be room.
                continue

    def _compact_gently(self) -> None:
        """Compact, resting after each record for as long as it took."""
        began = time.monotonic()
        for _ in self.compact():
            if self._closing.wait(time.monotonic() - began):
                return
            began = time.monotonic()
