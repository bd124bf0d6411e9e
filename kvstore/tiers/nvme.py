"""Pages in append-only segment files of one directory.

Every page is one write at the end of the newest segment and one read from where it lies. The index lives in
memory and is rebuilt from the segments' headers at start. Deleting appends a tombstone; a segment in which
nothing counts any more is unlinked, once what superseded its records is on the disk.
"""

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from threading import RLock

from kvstore.errors import (
    CorruptPageError,
    DirectoryLockedError,
    InvariantError,
    KvStoreError,
    StoreClosedError,
    TierFailedError,
    TierFullError,
)
from kvstore.page import HEADER_BYTES, Blob, PageHeader, PageKey, RecordKind, parse_header, seal, verify_checksum
from kvstore.tiers.log_index import LogIndex, PagePlace
from kvstore.tiers.segment import SegmentFile, SegmentScan, reported, scan_segment, without_torn_tail

SEGMENT_BYTES = 64 << 20
_SYNC_KEY = PageKey("", 0)


class NvmeTier:
    """A durable Tier on a local file system. One process at a time owns the directory.

    `limit_bytes` bounds the files' bytes, records that no longer count included (tombstones may exceed it).
    Raises DirectoryLockedError when the directory has an owner.
    """

    def __init__(self, directory: Path, *, segment_bytes: int = SEGMENT_BYTES, limit_bytes: int | None = None,
                 name: str = "nvme") -> None:  # fmt: skip
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._limit_bytes = limit_bytes
        self._name = name
        self._lock = RLock()
        self._index = LogIndex()
        self._segments: dict[int, SegmentFile] = {}
        self._unsynced = False
        self._failure: KvStoreError | None = None
        with reported(directory):
            directory.mkdir(parents=True, exist_ok=True)
        self._lock_descriptor = _own(directory)
        try:
            self._open_segments()
        except BaseException:
            self.close()
            raise

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
        return self._index.used_bytes

    @property
    def limit_bytes(self) -> int | None:
        return self._limit_bytes

    @property
    def file_bytes(self) -> int:
        """Bytes of the segment files, records that no longer count included."""
        with self._lock:
            return sum(segment.end for segment in self._segments.values())

    def fence(self, session: str, epoch: int) -> None:
        """Nobody else can write here: the directory has one owner."""

    def get(self, keys: Sequence[PageKey]) -> list[Blob | None]:
        return [self._get_one(key) for key in keys]

    def put(self, pages: Sequence[tuple[PageKey, Blob]], *, backed: bool = False, epoch: int | None = None) -> None:
        with self._lock:
            self._require_usable()
            for key, blob in pages:
                record = bytes(blob)
                self._require_room(len(record))
                place = self._append(record, parse_header(record).sequence)
                self._index.add_page(key, place)

    def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        with self._lock:
            return [key in self._index.pages for key in keys]

    def delete(self, keys: Sequence[PageKey], *, epoch: int | None = None) -> None:
        with self._lock:
            self._require_usable()
            known = [key for key in keys if key in self._index.pages]
            for key in known:
                header = PageHeader(key, self._index.pages[key].sequence, 0, 0, kind=RecordKind.TOMBSTONE)
                place = self._append(seal(header), header.sequence)
                self._index.add_tombstone(key, place.segment)
            if known:
                self._start_new_segment_if_dead()
                self.flush()

    def stored(self, session: str | None = None) -> Iterator[PageHeader]:
        with self._lock:
            self._require_open()
            places = self._index.places(session)
            raw = [self._segments[place.segment].read(place.offset, HEADER_BYTES) for place in places]
        return (parse_header(header) for header in raw)

    def flush(self) -> None:
        with self._lock:
            self._require_usable()
            if self._unsynced:
                self._sync()
            # Only now is whatever superseded a dead record safe, and the record's segment may go.
            for number in self._index.removable(sorted(self._segments)[:-1]):
                self._unlink(number)

    def check(self) -> None:
        with self._lock:
            self._index.check()
            for key, place in self._index.pages.items():
                if place.segment not in self._segments or place.offset + place.size > self._segments[place.segment].end:
                    raise InvariantError(f"tier {self._name}: page {key} lies outside the segment files: {place}")

    def close(self) -> None:
        with self._lock:
            for segment in self._segments.values():
                segment.close()
            self._segments.clear()
            self._failure = StoreClosedError(f"tier {self._name} is closed")
            if self._lock_descriptor >= 0:
                os.close(self._lock_descriptor)
                self._lock_descriptor = -1

    def _get_one(self, key: PageKey) -> bytes | None:
        with self._lock:
            self._require_open()
            place = self._index.pages.get(key)
            if place is None:
                return None
            if self._index.is_suspect(place):
                raise CorruptPageError(
                    f"page {key.index} of session {key.session!r} may be out of date: a record written after it in "
                    f"{self._directory} cannot be read any more; its rows must be computed again"
                )
            blob = self._segments[place.segment].read(place.offset, place.size)
        if len(blob) < place.size:
            raise CorruptPageError(f"page {key.index} of session {key.session!r} was cut off in {self._directory}")
        verify_checksum(blob, key)
        header = parse_header(blob)
        if header.key != key or header.sequence != place.sequence:
            raise CorruptPageError(f"found {header.key} where {key} was written in {self._directory}")
        return blob

    def _append(self, record: bytes, sequence: int) -> PagePlace:
        segment = self._segments[max(self._segments)]
        if segment.end and segment.end + len(record) > self._segment_bytes:
            segment = self._roll()
        offset = segment.append(record)
        self._unsynced = True
        return PagePlace(segment.number, offset, len(record), sequence)

    def _require_room(self, wanted: int) -> None:
        if self._limit_bytes is not None and self.file_bytes + wanted > self._limit_bytes:
            raise TierFullError(f"tier {self._name}: {wanted} bytes do not fit, {self.file_bytes} of "
                                f"{self._limit_bytes} are in use; raise its limit or drop sessions")  # fmt: skip

    def _roll(self) -> SegmentFile:
        newest = self._segments[max(self._segments)]
        # Readers take only the newest segment for possibly torn, so an older one must be on the disk as a whole.
        newest.cut(newest.end)
        self._fsync(newest)
        return self._open_segment(newest.number + 1)

    def _start_new_segment_if_dead(self) -> None:
        newest = max(self._segments)
        if any(True for _ in self._index.removable([newest])):
            self._roll()

    def _sync(self) -> None:
        newest = self._segments[max(self._segments)]
        self._fsync(newest)
        self._unsynced = False
        # The marker is only a help to the next start, so a full disk may refuse it.
        with suppress(TierFullError):
            newest.append(seal(PageHeader(_SYNC_KEY, 0, 0, 0, kind=RecordKind.SYNC)))

    def _fsync(self, segment: SegmentFile) -> None:
        try:
            segment.sync()
        except KvStoreError as error:
            # After a failed fsync the kernel may call the lost pages clean: a second try would prove nothing.
            self._failure = TierFailedError(f"tier {self._name}: a sync failed ({error}); restart to recover")
            raise

    def _unlink(self, number: int) -> None:
        segment = self._segments.pop(number)
        segment.close()
        with reported(segment.path):
            segment.path.unlink()
        _sync_directory(self._directory)
        self._index.forget(number)

    def _open_segments(self) -> None:
        numbers = sorted(int(path.stem.removeprefix("segment-")) for path in self._directory.glob("segment-*.kv"))
        for number in numbers:
            segment = self._open_segment(number)
            scan = scan_segment(segment)
            if number == numbers[-1]:
                scan = without_torn_tail(segment, scan)
                segment.cut(scan.end)
            elif scan.end < segment.end:
                self._index.add_damage(number, scan.end)
            self._index_records(number, scan)
        if not numbers:
            self._open_segment(1)

    def _open_segment(self, number: int) -> SegmentFile:
        segment = SegmentFile(self._directory / f"segment-{number:08d}.kv", number)
        self._segments[number] = segment
        _sync_directory(self._directory)
        return segment

    def _index_records(self, number: int, scan: SegmentScan) -> None:
        for offset in scan.damaged:
            self._index.add_damage(number, offset)
        for record in scan.records:
            header = record.header
            if header.kind is RecordKind.PAGE:
                place = PagePlace(number, record.offset, header.record_bytes, header.sequence)
                self._index.add_page(header.key, place)
            elif header.kind is RecordKind.TOMBSTONE:
                self._index.add_tombstone(header.key, number)

    def _require_open(self) -> None:
        if not self._segments and self._failure is not None:
            raise self._failure

    def _require_usable(self) -> None:
        if self._failure is not None:
            raise self._failure


def _own(directory: Path) -> int:
    with reported(directory):
        descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise DirectoryLockedError(
            f"{directory} belongs to another process; stop it, or give this one a directory of its own"
        ) from error
    return descriptor


def _sync_directory(directory: Path) -> None:
    with reported(directory):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
