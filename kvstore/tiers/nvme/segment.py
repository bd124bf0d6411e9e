"""One append-only file of records, and its recovery after a crash.

A record is a header and, for a page, its payload. Records are contiguous. A sync marker tells up to
which offset everything in the file was on the disk when it was written.
"""

import errno
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvstore.errors import PageError, PageVersionError, TierFailedError, TierFullError
from kvstore.format.page import (
    HEADER_BYTES,
    MAGIC,
    Blob,
    PageHeader,
    RecordKind,
    parse_header,
    verify_checksum,
)

_SEARCH_BYTES = 1 << 20


@dataclass(frozen=True)
class Record:
    """Header of a record and its offset in the segment."""

    offset: int
    header: PageHeader

    @property
    def end(self) -> int:
        """Offset of the next record."""
        return self.offset + self.header.record_bytes


@dataclass(frozen=True)
class SegmentScan:
    """Readable records of a segment, offsets of unreadable stretches, end of the last record."""

    records: tuple[Record, ...]
    damaged: tuple[int, ...]
    end: int


@contextmanager
def map_os_errors(path: Path) -> Iterator[None]:
    """Raise TierFullError (no space, quota) or TierFailedError for an OSError at `path`."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise TierFullError(
                f"no space left for {path}: free some or delete sessions"
            ) from error
        raise TierFailedError(f"{path}: {error.strerror or error}") from error


class SegmentFile:
    """An open segment file, closed when nothing refers to it.

    The tier serialises all calls except `read`, `read_into` and `sync`. Every call raises
    TierFullError or TierFailedError.
    """

    def __init__(self, path: Path, number: int) -> None:
        self.path = path
        self.number = number
        with map_os_errors(path):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            weakref.finalize(self, os.close, self._descriptor)
            self.end = os.fstat(self._descriptor).st_size

    def append(self, record: Blob) -> int:
        """Write a record at the end and return its offset; a failed write keeps the end."""
        offset = self.end
        with map_os_errors(self.path):
            written = 0
            while written < len(record):
                written += os.pwrite(
                    self._descriptor, memoryview(record)[written:], offset + written
                )
        self.end = offset + len(record)
        return offset

    def read(self, offset: int, size: int) -> memoryview:
        """Read up to `size` bytes from `offset` into new memory; fewer at the end of the file."""
        return self.read_into(np.empty(size, dtype=np.uint8).data, offset)

    def read_into(self, record: memoryview, offset: int) -> memoryview:
        """Read into `record` from `offset`; return the part that was filled."""
        read = 0
        with map_os_errors(self.path):
            while read < len(record) and (
                more := os.preadv(self._descriptor, [record[read:]], offset + read)
            ):
                read += more
        return record[:read]

    def get_status(self) -> os.stat_result:
        """Status of the file, also once it is unlinked; then it has no links."""
        return os.fstat(self._descriptor)

    def sync(self) -> None:
        """Wait until everything written is on the disk."""
        with map_os_errors(self.path):
            os.fsync(self._descriptor)

    def truncate(self, end: int) -> None:
        """Remove everything from offset `end` on."""
        with map_os_errors(self.path):
            os.ftruncate(self._descriptor, end)
        self.end = end


def scan_segment(segment: SegmentFile) -> SegmentScan:
    """Read a segment's headers in order; after an unreadable one continue at the next readable.

    Raises PageVersionError for an intact header of another format version: truncating or
    overwriting the file would lose pages of another kvrecall.
    """
    records: list[Record] = []
    damaged: list[int] = []
    offset = 0
    while offset < segment.end:
        record = _read_record(segment, offset)
        if record is None:
            following = _find_next_record(segment, offset + 1)
            if following is None:
                break
            damaged.append(offset)
            record = following
        records.append(record)
        offset = record.end
    return SegmentScan(tuple(records), tuple(damaged), records[-1].end if records else 0)


def scan_newest(segment: SegmentFile) -> SegmentScan:
    """Read the headers of the newest segment, without its torn tail. Raises as `scan_segment`."""
    return without_torn_tail(segment, scan_segment(segment))


def without_torn_tail(segment: SegmentFile, scan: SegmentScan) -> SegmentScan:
    """Return the scan of the newest segment without its torn tail.

    Only records after the last sync marker can be torn; they were never acknowledged. The first
    unreadable one of them ends the segment. An unreadable record before the marker is damage, and
    stays.
    """
    synced = max(
        (r.header.synced_bytes for r in scan.records if r.header.kind is RecordKind.SYNC), default=0
    )
    torn = [offset for offset in scan.damaged if offset >= synced]
    torn += [
        record.offset
        for record in scan.records
        if record.offset >= synced and not is_record_intact(segment, record)
    ]
    end = min(torn, default=scan.end)
    return SegmentScan(
        tuple(record for record in scan.records if record.end <= end),
        tuple(offset for offset in scan.damaged if offset < end),
        end,
    )


def is_record_intact(segment: SegmentFile, record: Record) -> bool:
    """Return whether the checksum over header and payload of a record matches."""
    try:
        verify_checksum(segment.read(record.offset, record.header.record_bytes), record.header.id)
    except PageError:
        return False
    return True


def _read_record(segment: SegmentFile, offset: int) -> Record | None:
    try:
        record = Record(offset, parse_header(segment.read(offset, HEADER_BYTES)))
    except PageVersionError as error:
        raise PageVersionError(f"{segment.path} at byte {offset}: {error}") from error
    except PageError:
        return None
    return record if record.end <= segment.end else None


def _find_next_record(segment: SegmentFile, offset: int) -> Record | None:
    while offset < segment.end:
        # The pieces overlap by the length of the magic, so that one on a boundary is found too.
        piece = bytes(segment.read(offset, _SEARCH_BYTES + len(MAGIC) - 1))
        found = piece.find(MAGIC)
        if found < 0:
            offset += _SEARCH_BYTES
            continue
        record = _read_record(segment, offset + found)
        if record is not None:
            return record
        offset += found + 1
    return None
