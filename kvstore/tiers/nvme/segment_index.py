"""Index file beside a closed segment: what all its headers say, in one sequential read.

    segment-N.index    header, entries, checksum

It only speeds up the start. It names the size and the time of the last change of the segment that
it describes; when these or its checksum do not match, the segment's headers are read instead.
"""

import struct
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import google_crc32c
import numpy as np

from kvstore.format.page import ID_BYTES, PageId, RecordKind
from kvstore.tiers.nvme.segment import SegmentFile, SegmentScan, scan_segment

_MAGIC = b"KVRX"
_VERSION = 2
_HEADER = struct.Struct("<4sHxxIQQ")
_CHECKSUM = struct.Struct("<I")
_ENTRY = np.dtype(
    [
        ("id", f"V{ID_BYTES}"),
        ("offset", "<u8"),
        ("written_at", "<u8"),
        ("size", "<u4"),
        ("kind", "u1"),
        ("padding", "u1", 3),
    ]
)


class IndexEntry(NamedTuple):
    """Header of one page or tombstone, and its place in the segment."""

    kind: int
    id: PageId
    offset: int
    size: int
    written_at: int


Entry = tuple[int, PageId, int, int, int]
"""An IndexEntry without names: a start reads millions of them."""


def from_scan(scan: SegmentScan) -> list[IndexEntry]:
    """Build the entries of a segment whose headers were read: pages and tombstones in their order."""
    return [
        IndexEntry(
            int(record.header.kind),
            record.header.id,
            record.offset,
            record.header.record_bytes,
            record.header.written_at,
        )
        for record in scan.records
        if record.header.kind is not RecordKind.SYNC
    ]


def read_closed(segment: SegmentFile) -> Iterable[Entry]:
    """Read a segment that is never written again: from its index file, which is added if missing.

    Raises as `scan_segment`.
    """
    entries = _read_index(segment)
    if entries is None:
        entries = from_scan(scan_segment(segment))
        write_index(segment, entries)
    return entries


def write_index(segment: SegmentFile, entries: Sequence[IndexEntry]) -> None:
    """Write a closed segment's index file; without it the next start only takes longer."""
    with suppress(OSError):
        content = _encode(entries, *_get_state(segment))
        get_path(segment).write_bytes(content + _CHECKSUM.pack(google_crc32c.value(content)))
        if not segment.get_status().st_nlink:  # another thread has removed the segment meanwhile
            remove_index(segment)


def remove_index(segment: SegmentFile) -> None:
    """Remove the index file of a segment that is removed."""
    with suppress(OSError):
        get_path(segment).unlink(missing_ok=True)


def remove_others(directory: Path, segments: Iterable[SegmentFile]) -> None:
    """Remove index files of other segments than these closed ones: a crash may leave some."""
    known = {get_path(segment) for segment in segments}
    for path in directory.glob("segment-*.index"):
        if path not in known:
            with suppress(OSError):
                path.unlink()


def get_path(segment: SegmentFile) -> Path:
    """Path of a segment's index file."""
    return segment.path.with_suffix(".index")


def _encode(entries: Sequence[IndexEntry], size: int, changed: int) -> bytes:
    table = np.zeros(len(entries), dtype=_ENTRY)
    for name in IndexEntry._fields:
        table[name] = [getattr(each, name) for each in entries]
    return _HEADER.pack(_MAGIC, _VERSION, len(table), size, changed) + table.tobytes()


def _read_index(segment: SegmentFile) -> Iterable[Entry] | None:
    """Read an index file; None when there is none for the segment as it is now."""
    try:
        content = get_path(segment).read_bytes()
    except OSError:
        return None
    body = content[: -_CHECKSUM.size]
    if len(body) < _HEADER.size or content[len(body) :] != _CHECKSUM.pack(
        google_crc32c.value(body)
    ):
        return None
    magic, version, count, *state = _HEADER.unpack_from(body)
    if (magic, version) != (_MAGIC, _VERSION) or tuple(state) != _get_state(segment):
        return None
    table = np.frombuffer(body, _ENTRY, count, _HEADER.size)
    return zip(*(table[name].tolist() for name in IndexEntry._fields), strict=True)


def _get_state(segment: SegmentFile) -> tuple[int, int]:
    """Size of the file and the time of its last change in nanoseconds."""
    status = segment.get_status()
    return status.st_size, status.st_mtime_ns
