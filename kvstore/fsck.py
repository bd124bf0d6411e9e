"""Checks stored pages that no process uses: every record's header and payload, and which records count.

Pure reading. What is found wrong is said, never mended: the row store does that itself when it is opened.
"""

import fcntl
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from kvstore.errors import CorruptPageError, DirectoryLockedError, InvariantError, PageError
from kvstore.format.page import PageHeader, PageKey, RecordKind, verify_checksum
from kvstore.tiers.base import Tier
from kvstore.tiers.nvme.index import LogIndex, PagePlace
from kvstore.tiers.nvme.segment import (
    Record,
    SegmentFile,
    reported,
    scan_segment,
    without_torn_tail,
)

_LOCK = "lock"
_READ_PAGES = 64


@dataclass(frozen=True)
class SegmentReport:
    """One file of records. `pages` count, of `live_bytes`; whatever else can be read is dead and goes in time.

    damaged: stretches in which no header can be read. corrupt: records whose checksum does not hold and that no longer
    count.     torn_bytes: at the end of the last file, cut off at the next start; nobody was told that they are safe.
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
        """Bytes that no longer count."""
        return self.file_bytes - self.live_bytes - self.torn_bytes


@dataclass(frozen=True)
class FoundPage:
    """A page that a tier holds; `damage` says why its rows cannot be used, empty where they can."""

    header: PageHeader
    damage: str = ""


@dataclass(frozen=True)
class PagesReport:
    """What one tier holds. `wrong_books` is what the tier's own check says, empty when it says nothing."""

    tier: str
    pages: Mapping[PageKey, FoundPage]
    segments: tuple[SegmentReport, ...] = ()
    wrong_books: str = ""

    @property
    def bytes(self) -> int:
        """Of the pages that count, headers included."""
        return sum(page.header.record_bytes for page in self.pages.values())


@contextmanager
def unused(directory: Path) -> Iterator[None]:
    """Be sure that no process uses the pages in `directory`, and that none begins to until the end.

    Raises DirectoryLockedError when one does.
    """
    lock = directory / _LOCK
    if not lock.exists():
        yield
        return
    with reported(lock), lock.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DirectoryLockedError(
                f"{directory} belongs to a process that runs; stop it first"
            ) from error
        yield


def check_directory(directory: Path) -> PagesReport:
    """Read every record of the segment files in `directory`; to be called within `unused`.

    Raises TierFailedError when a file cannot be read.
    """
    paths = sorted(directory.glob("segment-*.kv"), key=_number)
    logs = [_read(path, newest=path == paths[-1]) for path in paths]
    index = LogIndex()
    for log in logs:
        _add_to(index, log)
    headers = {(log.number, record.offset): record.header for log in logs for record in log.records}
    corrupt = {(log.number, offset) for log in logs for offset in log.corrupt}
    pages = {
        key: FoundPage(headers[place.position], _damage(index, place, corrupt))
        for key, place in index.pages.items()
    }
    return PagesReport("nvme", MappingProxyType(pages), tuple(_report(log, index) for log in logs))


def check_tier(tier: Tier) -> PagesReport:
    """Read every page that a tier holds, as it is: pages may come and go meanwhile where others use it too.

    Raises TierFailedError when the tier does not answer.
    """
    wrong = ""
    try:
        tier.check()
    except InvariantError as error:
        wrong = str(error)
    headers = {header.key: header for header in tier.stored()}
    damaged = _damaged(tier, sorted(headers))
    pages = {key: FoundPage(header, damaged.get(key, "")) for key, header in headers.items()}
    return PagesReport(tier.name, MappingProxyType(pages), wrong_books=wrong)


def _damaged(tier: Tier, keys: Sequence[PageKey]) -> dict[PageKey, str]:
    found: dict[PageKey, str] = {}
    for first in range(0, len(keys), _READ_PAGES):
        some = keys[first : first + _READ_PAGES]
        try:
            blobs = tier.get(some)
        except PageError as error:
            # One of them: which, only reading each by itself tells.
            found |= {some[0]: str(error)} if len(some) == 1 else _damaged_one_by_one(tier, some)
            continue
        found |= {key: "it is gone" for key, blob in zip(some, blobs, strict=True) if blob is None}
    return found


def _damaged_one_by_one(tier: Tier, keys: Sequence[PageKey]) -> dict[PageKey, str]:
    found: dict[PageKey, str] = {}
    for key in keys:
        found |= _damaged(tier, [key])
    return found


def _damage(index: LogIndex, place: PagePlace, corrupt: Container[tuple[int, int]]) -> str:
    if place.position in corrupt:
        return "its checksum does not hold"
    return (
        "a later record, which cannot be read, may have replaced it"
        if index.is_suspect(place)
        else ""
    )


@dataclass(frozen=True)
class _Log:
    """One segment file, read. `damaged`: offsets of unreadable stretches; `corrupt`: of pages that are not whole."""

    name: str
    number: int
    file_bytes: int
    records: tuple[Record, ...]
    damaged: tuple[int, ...]
    corrupt: frozenset[int]
    torn_bytes: int


def _read(path: Path, *, newest: bool) -> _Log:
    """All headers and payloads, as a tier takes them in when it starts. Raises TierFailedError."""
    segment = SegmentFile(path, _number(path))
    scan = scan_segment(segment)
    torn = 0
    damaged = scan.damaged
    if newest:
        scan = without_torn_tail(segment, scan)
        damaged = scan.damaged
        torn = segment.end - scan.end
    elif scan.end < segment.end:
        damaged = (*damaged, scan.end)
    corrupt = frozenset(record.offset for record in scan.records if not _is_whole(segment, record))
    return _Log(path.name, segment.number, segment.end, scan.records, damaged, corrupt, torn)


def _add_to(index: LogIndex, log: _Log) -> None:
    for offset in log.damaged:
        index.add_damage(log.number, offset)
    for record in log.records:
        header = record.header
        if header.kind is RecordKind.PAGE:
            index.add_page(
                header.key,
                PagePlace(log.number, record.offset, header.record_bytes, header.sequence),
            )
        elif header.kind is RecordKind.TOMBSTONE:
            index.add_tombstone(header.key, log.number)


def _report(log: _Log, index: LogIndex) -> SegmentReport:
    live = {
        place.offset: place.size for place in index.pages.values() if place.segment == log.number
    }
    counts = (len(live), sum(live.values()), len(log.damaged), len(log.corrupt - live.keys()))
    return SegmentReport(log.name, log.file_bytes, *counts, log.torn_bytes)


def _number(path: Path) -> int:
    return int(path.stem.removeprefix("segment-"))


def _is_whole(segment: SegmentFile, record: Record) -> bool:
    try:
        verify_checksum(segment.read(record.offset, record.header.record_bytes), record.header.key)
    except CorruptPageError:
        return False
    return True
