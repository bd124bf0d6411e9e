"""Tier of append-only segment files in one directory.

A page is written at the end of the newest segment in one write, and read in place. Deleting appends
a tombstone. A background thread compacts mostly dead segments: it moves their valid records to the
end of the log and unlinks them.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event, Lock, Thread

from kvstore.errors import CorruptPageError, StoreClosedError, TierError, TierFullError
from kvstore.format.page import Blob, PageHeader, PageId, RecordCheck
from kvstore.tiers.arena import BufferPool
from kvstore.tiers.base import DeviceStatus
from kvstore.tiers.nvme.segment import map_os_errors
from kvstore.tiers.nvme.segment_log import Located, SegmentLog

SEGMENT_BYTES = 64 << 20
# Between two looks for a segment to compact, which visit all segments: flushes come far more often.
_COMPACTION_SECONDS = 0.5
RESERVE_BYTES = 64 << 20
DEAD_SHARE = 0.5
"""Dead share of a segment from which it is compacted: moving then writes no more than it frees."""

# The default reserve is at most 1/8 of the file system.
_RESERVE_FRACTION = 8
_DEAD_SHARE_WHEN_FULL = 0.2
# Pages are read in pieces, so that the checksum finds each in the processor's cache.
_PIECE_BYTES = 1 << 20
# Memory that pages are read into is reused, which costs less than new memory.
_BUFFER_BYTES = 1 << 27


class NvmeTier:
    """A durable Tier on a local file system. One process at a time owns the directory.

    Args:
        directory: Directory of the segment files; created if necessary.
        segment_bytes: Size at which a new segment file is started.
        limit_bytes: Maximum size of all files, dead records included. Tombstones and the move of
            one segment's records may exceed it.
        reserve_bytes: Bytes of the file system that pages leave free, by default `RESERVE_BYTES`
            or an eighth of a small file system: for a catalog on the same disk, for tombstones and
            (half of it) for compaction, so that deleting pages can empty a full disk.
        name: Name of the tier for metrics.
        compact_in_background: Whether a thread compacts segments; otherwise records are moved only
            when there is no room.

    Raises:
        DirectoryLockedError: Another process uses the directory.
        PageVersionError: The directory has records of another format version.
    """

    durable = True
    shared = False
    life_seconds = None

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
        self.name = name
        self.limit_bytes = limit_bytes
        self._directory = directory
        self._reserve_bytes = reserve_bytes
        self._log = SegmentLog(directory, segment_bytes, name)
        self._buffers = BufferPool(_BUFFER_BYTES)
        self._writing = Lock()
        self._changed = Event()
        self._closing = Event()
        self._compactions = 0
        self._compaction: Thread | None = None
        if compact_in_background:
            self._changed.set()
            self._compaction = Thread(
                target=self._compact, name="kvstore-nvme-compaction", daemon=True
            )
            self._compaction.start()

    @property
    def used_bytes(self) -> int:
        """Bytes of the valid pages, headers included."""
        return self._log.used_bytes

    @property
    def file_bytes(self) -> int:
        """Bytes of the segment files, dead records included."""
        return self._log.file_bytes

    def get(self, ids: Sequence[PageId]) -> list[Blob | None]:
        """Read and verify pages, None where there is none. Raises CorruptPageError."""
        # Sequential: parallel reads and kernel read-ahead were both slower from a disk.
        return [
            None if located is None else self._read(page_id, located)
            for page_id, located in zip(ids, self._log.locate(ids), strict=True)
        ]

    def put(self, pages: Sequence[tuple[PageId, Blob]], *, backed: bool = False) -> None:
        """Append pages to the log, compacting a segment first when there is no room."""
        with self._writing:
            for page_id, blob in pages:
                self._make_room(len(blob))
                self._log.append_page(page_id, blob)

    def keep(self, ids: Sequence[PageId]) -> None:
        """Do nothing: pages in files do not expire."""

    def contains(self, ids: Sequence[PageId]) -> list[bool]:
        """Return whether the log has each page."""
        return self._log.contains(ids)

    def delete(self, ids: Sequence[PageId]) -> None:
        """Append tombstones; unknown ids are ignored."""
        self._log.append_tombstones(ids)

    def stored(self) -> Iterator[PageHeader]:
        """Yield the headers of all pages, each read from its file; of broken ones `page_tokens` is 0."""
        return self._log.headers()

    def list_ids(self, written_before: int) -> list[PageId]:
        """Return the ids of the pages that were written before a time; reads no file."""
        return self._log.list_ids(written_before)

    def flush(self) -> None:
        """Wait until every page and tombstone is on the disk; wakes the compaction."""
        self._log.flush()
        self._changed.set()

    def get_device(self) -> DeviceStatus | None:
        """Return the state of the file system. Raises TierFailedError."""
        free, _ = self._get_free_and_reserve()
        dead = self.file_bytes - self.used_bytes
        return DeviceStatus(free, max(0, dead), self._compactions)

    def compact(self, dead_share: float = DEAD_SHARE) -> Iterator[int]:
        """Compact segments with at least that dead share; yields the bytes of each moved record."""
        while (number := self._find_compactable(dead_share)) is not None:
            yield from self._log.move_records(number)
            self._compactions += 1

    def check(self) -> None:
        """Raise InvariantError when the index disagrees with the files."""
        self._log.check()

    def close(self) -> None:
        """Stop the compaction and release the directory. May be called twice."""
        self._closing.set()
        self._changed.set()
        if self._compaction is not None:
            self._compaction.join()
        self._log.close()

    def _read(self, page_id: PageId, located: Located) -> memoryview:
        """Read a page and verify it piece by piece. Raises CorruptPageError."""
        location, segment = located
        record = self._buffers.allocate(location.size)
        check = RecordCheck()
        for first in range(0, location.size, _PIECE_BYTES):
            piece = record[first : first + _PIECE_BYTES]
            check.add(segment.read_into(piece, location.offset + first))
        try:
            check.require(page_id)
        except CorruptPageError:
            self._log.mark_damaged(page_id, location)
            raise
        return record

    def _make_room(self, needed: int) -> None:
        """Raise TierFullError unless limit and disk allow `needed` bytes, after compaction."""
        while (shortage := self._describe_shortage(needed)) is not None:
            hopeless = self.limit_bytes is not None and self.used_bytes + needed > self.limit_bytes
            if hopeless or not self._compact_now():
                raise TierFullError(f"tier {self.name}: {needed} bytes do not fit, {shortage}")

    def _describe_shortage(self, needed: int) -> str | None:
        """Describe why `needed` bytes do not fit now; None when they do."""
        if self.limit_bytes is not None and self.file_bytes + needed > self.limit_bytes:
            return (
                f"{self.file_bytes} of {self.limit_bytes} in use; "
                "raise its limit or delete sessions"
            )
        free, reserve = self._get_free_and_reserve()
        if free - needed < reserve:
            return (
                f"{free} are free on the disk, {reserve} of them reserved; "
                "free some or delete sessions"
            )
        return None

    def _get_free_and_reserve(self) -> tuple[int, int]:
        """Free bytes of the file system, and the bytes that pages leave free."""
        with map_os_errors(self._directory):
            disk = os.statvfs(self._directory)
        share = disk.f_blocks * disk.f_frsize // _RESERVE_FRACTION
        reserve = min(RESERVE_BYTES, share) if self._reserve_bytes is None else self._reserve_bytes
        return disk.f_bavail * disk.f_frsize, reserve

    def _find_compactable(self, dead_share: float) -> int | None:
        """Number of a segment to compact whose valid records fit on the disk a second time."""
        free, reserve = self._get_free_and_reserve()
        return self._log.find_compactable(dead_share, free - reserve // 2)

    def _compact_now(self) -> bool:
        """Compact one segment without pauses; return whether that freed anything."""
        before = self.file_bytes
        number = self._find_compactable(_DEAD_SHARE_WHEN_FULL)
        if number is None and self._log.roll_newest(_DEAD_SHARE_WHEN_FULL):
            number = self._find_compactable(_DEAD_SHARE_WHEN_FULL)
        if number is not None:
            for _ in self._log.move_records(number):
                pass
            self._compactions += 1
        return self.file_bytes < before

    def _compact(self) -> None:
        while self._changed.wait() and not self._closing.is_set():
            self._changed.clear()
            # No room yet, or the tier failed; the next write raises it.
            with suppress(TierError, StoreClosedError):
                self._compact_throttled()
            self._closing.wait(_COMPACTION_SECONDS)

    def _compact_throttled(self) -> None:
        """Compact, pausing after each record for as long as its move took."""
        began = time.monotonic()
        for _ in self.compact():
            if self._closing.wait(time.monotonic() - began):
                return
            began = time.monotonic()
