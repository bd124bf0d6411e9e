"""Index file beside a closed segment: what all its headers say, in one sequential read.

    segment-N.index    header, entries, offsets of damaged stretches, session ids, checksum

It only speeds up the start. It names the size and the time of the last change of the segment that
it describes; when these or its checksum do not match, the segment's headers are read instead.
"""

import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import google_crc32c
import numpy as np

from kvstore.format.page import RecordKind
from kvstore.tiers.nvme.segment import SegmentFile, SegmentScan, scan_segment

_MAGIC = b"KVRX"
_VERSION = 1
_HEADER = struct.Struct("<4sHxxIIIQQQ")
_CHECKSUM = struct.Struct("<I")
_ENTRY = np.dtype(
    [
        ("sequence", "<u8"),
        ("offset", "<u8"),
        ("size", "<u4"),
        ("page", "<u4"),
        ("session", "<u4"),
        ("kind", "u1"),
        ("padding", "u1", 3),
    ]
)


class IndexEntry(NamedTuple):
    """Header of one page or tombstone, and its place in the segment."""

    kind: int
    session: str
    page: int
    sequence: int
    offset: int
    size: int


@dataclass(frozen=True)
class SegmentEntries:
    """Pages and tombstones of a segment in their order, damaged stretches, end of the records."""

    entries: Sequence[IndexEntry]
    damaged: tuple[int, ...]
    end: int


def from_scan(scan: SegmentScan) -> SegmentEntries:
    """Build the entries of a segment whose headers were read."""
    entries = [
        IndexEntry(
            int(record.header.kind),
            record.header.key.session,
            record.header.key.index,
            record.header.sequence,
            record.offset,
            record.header.record_bytes,
        )
        for record in scan.records
        if record.header.kind is not RecordKind.SYNC
    ]
    return SegmentEntries(entries, scan.damaged, scan.end)


def read_closed(segment: SegmentFile) -> SegmentEntries:
    """Read a segment that is never written again: from its index file, which is added if missing.

    Raises as `scan_segment`.
    """
    entries = _read_index(segment)
    if entries is None:
        entries = from_scan(scan_segment(segment))
        write_index(segment, entries)
    return entries


def write_index(segment: SegmentFile, entries: SegmentEntries) -> None:
    """Write a closed segment's index file; without it the next start only takes longer."""
    with suppress(OSError):
        content = _encode(entries, *_get_state(segment))
        get_path(segment).write_bytes(content + _CHECKSUM.pack(google_crc32c.value(content)))


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


def _encode(entries: SegmentEntries, size: int, changed: int) -> bytes:
    numbers: dict[str, int] = {}
    table = np.zeros(len(entries.entries), dtype=_ENTRY)
    table["session"] = [numbers.setdefault(each.session, len(numbers)) for each in entries.entries]
    for name in ("kind", "page", "sequence", "offset", "size"):
        table[name] = [getattr(each, name) for each in entries.entries]
    names = [name.encode() for name in numbers]
    counts = (len(table), len(names), len(entries.damaged))
    parts = (
        _HEADER.pack(_MAGIC, _VERSION, *counts, size, changed, entries.end),
        table.tobytes(),
        np.array(entries.damaged, dtype="<u8").tobytes(),
        bytes(map(len, names)),
        *names,
    )
    return b"".join(parts)


def _read_index(segment: SegmentFile) -> SegmentEntries | None:
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
    magic, version, count, sessions, damaged, *state, end = _HEADER.unpack_from(body)
    if (magic, version) != (_MAGIC, _VERSION) or tuple(state) != _get_state(segment):
        return None
    table = np.frombuffer(body, _ENTRY, count, _HEADER.size)
    position = _HEADER.size + table.nbytes
    stretches = np.frombuffer(body, "<u8", damaged, position).tolist()
    names = list(_split_names(body, position + 8 * damaged, sessions))
    columns = [table[name].tolist() for name in ("page", "sequence", "offset", "size")]
    owners = [names[number] for number in table["session"].tolist()]
    entries = list(map(IndexEntry, table["kind"].tolist(), owners, *columns))
    return SegmentEntries(entries, tuple(stretches), end)


def _split_names(body: bytes, position: int, count: int) -> Iterator[str]:
    start = position + count
    for length in body[position:start]:
        yield body[start : start + length].decode()
        start += length


def _get_state(segment: SegmentFile) -> tuple[int, int]:
    """Size of the file and the time of its last change in nanoseconds."""
    status = os.stat(segment.path)
    return status.st_size, status.st_mtime_ns
