"""One append-only file of records, and how it is read back after a crash.

A record is a header and, for a page, its payload. Records follow each other without gaps. A sync marker says
up to where, by its sequence number, everything had reached the disk when the marker was written.
"""

import errno
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvstore.errors import PageError, TierFailedError, TierFullError
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
    """A record's header and where in its segment it begins."""

    offset: int
    header: PageHeader

    @property
    def end(self) -> int:
        """Where the next record begins."""
        return self.offset + self.header.record_bytes


@dataclass(frozen=True)
class SegmentScan:
    """What a segment holds: its readable records, the offsets of stretches that cannot be read, its good end."""

    records: tuple[Record, ...]
    damaged: tuple[int, ...]
    end: int


@contextmanager
def reported(path: Path) -> Iterator[None]:
    """Turn an OSError into TierFullError (no space, quota) or TierFailedError, naming the file."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise TierFullError(f"no space left for {path}: free some or drop sessions") from error
        raise TierFailedError(f"{path}: {error.strerror or error}") from error


class SegmentFile:
    """An open segment file, closed when nobody refers to it. Its tier serialises all calls but `read` and `sync`."""

    def __init__(self, path: Path, number: int) -> None:
        self.path = path
        self.number = number
        with reported(path):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            weakref.finalize(self, os.close, self._descriptor)
            self.end = os.fstat(self._descriptor).st_size

    def append(self, record: Blob) -> int:
        """Write a record at the end and return its offset. A write that fails leaves the end where it was."""
        offset = self.end
        with reported(self.path):
            written = 0
            while written < len(record):
                written += os.pwrite(
                    self._descriptor, memoryview(record)[written:], offset + written
                )
        self.end = offset + len(record)
        return offset

    def read(self, offset: int, size: int) -> memoryview:
        """Up to `size` bytes from `offset`, in memory of their own; fewer at the end of the file."""
        return self.read_into(np.empty(size, dtype=np.uint8).data, offset)

    def read_into(self, record: memoryview, offset: int) -> memoryview:
        """Fill `record` from `offset`; returns what was filled, less than all at the end of the file."""
        read = 0
        with reported(self.path):
            while read < len(record) and (
                more := os.preadv(self._descriptor, [record[read:]], offset + read)
            ):
                read += more
        return record[:read]

    def sync(self) -> None:
        """Return when everything written is on the disk."""
        with reported(self.path):
            os.fsync(self._descriptor)

    def cut(self, end: int) -> None:
        """Forget everything from `end` on."""
        with reported(self.path):
            os.ftruncate(self._descriptor, end)
        self.end = end


def scan_segment(segment: SegmentFile) -> SegmentScan:
    """Read a segment's headers, in order; where one is unreadable, go on at the next header that is readable."""
    records: list[Record] = []
    damaged: list[int] = []
    offset = 0
    while offset < segment.end:
        record = _record_at(segment, offset)
        if record is None:
            following = _next_record(segment, offset + 1)
            if following is None:
                break
            damaged.append(offset)
            record = following
        records.append(record)
        offset = record.end
    return SegmentScan(tuple(records), tuple(damaged), records[-1].end if records else 0)


def without_torn_tail(segment: SegmentFile, scan: SegmentScan) -> SegmentScan:
    """The scan of a segment that was being written, cut where its writing was torn.

    Only records after the last sync marker can be torn: nobody was told that they are safe. The first of
    them that is unreadable ends the segment; one before the marker is damage, and stays.
    """
    synced = max(
        (r.header.sequence for r in scan.records if r.header.kind is RecordKind.SYNC), default=0
    )
    torn = [offset for offset in scan.damaged if offset >= synced]
    torn += [r.offset for r in scan.records if r.offset >= synced and not _is_whole(segment, r)]
    end = min(torn, default=scan.end)
    return SegmentScan(
        tuple(record for record in scan.records if record.end <= end),
        tuple(offset for offset in scan.damaged if offset < end),
        end,
    )


def _record_at(segment: SegmentFile, offset: int) -> Record | None:
    try:
        record = Record(offset, parse_header(segment.read(offset, HEADER_BYTES)))
    except PageError:
        return None
    return record if record.end <= segment.end else None


def _next_record(segment: SegmentFile, offset: int) -> Record | None:
    while offset < segment.end:
        # The pieces overlap by the magic's length, so that one on a boundary is found too.
        piece = bytes(segment.read(offset, _SEARCH_BYTES + len(MAGIC) - 1))
        found = piece.find(MAGIC)
        if found < 0:
            offset += _SEARCH_BYTES
            continue
        record = _record_at(segment, offset + found)
        if record is not None:
            return record
        offset += found + 1
    return None


def _is_whole(segment: SegmentFile, record: Record) -> bool:
    try:
        verify_checksum(segment.read(record.offset, record.header.record_bytes), record.header.key)
    except PageError:
        return False
    return True
