"""Offline check of stored pages: verifies every header and payload of a directory or a tier.

Nothing is changed. The row store repairs by itself when it is opened.
"""

import fcntl
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from kvstore.errors import DirectoryLockedError, InvariantError, PageError
from kvstore.format.page import PageHeader, PageId, RecordKind
from kvstore.tiers.base import Tier
from kvstore.tiers.nvme.index import LogIndex, RecordLocation
from kvstore.tiers.nvme.segment import (
    Record,
    SegmentFile,
    is_record_intact,
    map_os_errors,
    scan_segment,
    without_torn_tail,
)

_LOCK = "lock"
_READ_PAGES = 64


@dataclass(frozen=True)
class SegmentReport:
    """Contents of one segment file.

    Attributes:
        name: Name of the file.
        file_bytes: Size of the file.
        pages: Pages of which this file has the valid record.
        live_bytes: Bytes of these records. All other readable records are dead and are removed
            by compaction.
        damaged: Stretches without a readable header.
        corrupt: Dead records whose checksum does not match.
        torn_bytes: Bytes at the end of the newest file that the next start truncates; they were
            never acknowledged.
    """

    name: str
    file_bytes: int
    pages: int
    live_bytes: int
    damaged: int
    corrupt: int
    torn_bytes: int

    @property
    def dead_bytes(self) -> int:
        """Bytes of records that are not valid any more."""
        return self.file_bytes - self.live_bytes - self.torn_bytes


@dataclass(frozen=True)
class StoredPage:
    """A page that a tier holds; `damage` is why its rows cannot be used, empty when they can."""

    header: PageHeader
    damage: str = ""


@dataclass(frozen=True)
class PagesReport:
    """Contents of one tier; `accounting_error` is the error of the tier's own check, or empty.

    `expires`: whether its pages have a time to live.
    """

    tier: str
    pages: Mapping[PageId, StoredPage]
    segments: tuple[SegmentReport, ...] = ()
    accounting_error: str = ""
    expires: bool = False

    @property
    def bytes(self) -> int:
        """Bytes of the valid pages, headers included."""
        return sum(page.header.record_bytes for page in self.pages.values())


@contextmanager
def locked_directory(directory: Path) -> Iterator[None]:
    """Lock a page directory, so that no other process uses it until the end of the block.

    Raises DirectoryLockedError when a process uses it.
    """
    lock = directory / _LOCK
    if not lock.exists():
        yield
        return
    with map_os_errors(lock), lock.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DirectoryLockedError(
                f"{directory} is used by a running process; stop it first"
            ) from error
        yield


def check_directory(
    directory: Path, report: Callable[[int, int], None] | None = None
) -> PagesReport:
    """Read every record of the segment files in a directory locked by `locked_directory`.

    `report` is called with the number of files that are read, and that of all.

    Raises TierFailedError when a file cannot be read, PageVersionError when it has records of
    another format version.
    """
    paths = sorted(directory.glob("segment-*.kv"), key=_get_number)
    logs = []
    for path in paths:
        logs.append(_read_log(path, newest=path == paths[-1]))
        if report is not None:
            report(len(logs), len(paths))
    index = LogIndex()
    for log in logs:
        _add_to_index(index, log)
    headers = {(log.number, record.offset): record.header for log in logs for record in log.records}
    corrupt = {(log.number, offset) for log in logs for offset in log.corrupt}
    pages = {
        page_id: StoredPage(
            headers[location.position],
            "its checksum does not match" if location.position in corrupt else "",
        )
        for page_id, location in index.locations()
    }
    reports = tuple(_build_report(log, index) for log in logs)
    return PagesReport("nvme", MappingProxyType(pages), reports)


def check_tier(tier: Tier) -> PagesReport:
    """Read every page of a tier; other processes may add and delete pages meanwhile.

    Raises TierFailedError when the tier does not answer.
    """
    accounting_error = ""
    try:
        tier.check()
    except InvariantError as error:
        accounting_error = str(error)
    headers = {header.id: header for header in tier.stored()}
    damage = _find_damage(tier, sorted(headers))
    pages = {
        page_id: StoredPage(header, damage.get(page_id, "")) for page_id, header in headers.items()
    }
    return PagesReport(
        tier.name,
        MappingProxyType(pages),
        accounting_error=accounting_error,
        expires=tier.life_seconds is not None,
    )


def _find_damage(tier: Tier, ids: Sequence[PageId]) -> dict[PageId, str]:
    damage: dict[PageId, str] = {}
    for first in range(0, len(ids), _READ_PAGES):
        batch = ids[first : first + _READ_PAGES]
        try:
            blobs = tier.get(batch)
        except PageError as error:
            # The error does not name the page; single reads find it.
            single = len(batch) == 1
            damage |= {batch[0]: str(error)} if single else _find_damage_singly(tier, batch)
            continue
        damage |= {
            page_id: "it is gone"
            for page_id, blob in zip(batch, blobs, strict=True)
            if blob is None
        }
    return damage


def _find_damage_singly(tier: Tier, ids: Sequence[PageId]) -> dict[PageId, str]:
    damage: dict[PageId, str] = {}
    for page_id in ids:
        damage |= _find_damage(tier, [page_id])
    return damage


@dataclass(frozen=True)
class _Log:
    """A segment file that was read: offsets of `damaged` stretches and of `corrupt` records."""

    name: str
    number: int
    file_bytes: int
    records: tuple[Record, ...]
    damaged: tuple[int, ...]
    corrupt: frozenset[int]
    torn_bytes: int


def _read_log(path: Path, *, newest: bool) -> _Log:
    """Read all headers and payloads of a file, as the tier does at its start."""
    segment = SegmentFile(path, _get_number(path))
    scan = scan_segment(segment)
    torn = 0
    damaged = scan.damaged
    if newest:
        scan = without_torn_tail(segment, scan)
        damaged = scan.damaged
        torn = segment.end - scan.end
    elif scan.end < segment.end:
        damaged = (*damaged, scan.end)
    corrupt = frozenset(
        record.offset for record in scan.records if not is_record_intact(segment, record)
    )
    return _Log(path.name, segment.number, segment.end, scan.records, damaged, corrupt, torn)


def _add_to_index(index: LogIndex, log: _Log) -> None:
    for record in log.records:
        header = record.header
        if header.kind is RecordKind.PAGE:
            location = RecordLocation(
                log.number, record.offset, header.record_bytes, header.written_at
            )
            index.add_page(header.id, location)
        elif header.kind is RecordKind.TOMBSTONE:
            index.add_tombstone(header.id, log.number)


def _build_report(log: _Log, index: LogIndex) -> SegmentReport:
    live = {
        location.offset: location.size
        for _, location in index.locations()
        if location.segment == log.number
    }
    return SegmentReport(
        name=log.name,
        file_bytes=log.file_bytes,
        pages=len(live),
        live_bytes=sum(live.values()),
        damaged=len(log.damaged),
        corrupt=len(log.corrupt - live.keys()),
        torn_bytes=log.torn_bytes,
    )


def _get_number(path: Path) -> int:
    return int(path.stem.removeprefix("segment-"))
