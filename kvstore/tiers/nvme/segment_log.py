"""A directory of segment files as one log: records are appended to the newest, and whole segments leave.

The index of what counts lives in memory and is rebuilt from the segments' headers at start. A segment in which nothing
counts any more is unlinked, once what superseded its records is on the disk. Records that count in a segment of mostly
dead ones can be written again at the end of the log (`moves`), which kills the rest of that segment too.
"""

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock, RLock

from kvstore.errors import (
    CorruptPageError,
    DirectoryLockedError,
    InvariantError,
    KvStoreError,
    PageError,
    StoreClosedError,
    TierFailedError,
    TierFullError,
)
from kvstore.format.page import (
    HEADER_BYTES,
    Blob,
    PageHeader,
    PageKey,
    RecordCheck,
    RecordKind,
    parse_header,
    seal,
    sequence_of,
)
from kvstore.tiers.nvme.index import LogIndex, PagePlace
from kvstore.tiers.nvme.segment import (
    SegmentFile,
    SegmentScan,
    reported,
    scan_segment,
    without_torn_tail,
)

_SYNC_KEY = PageKey("", 0)
Located = tuple[PagePlace, SegmentFile]


class SegmentLog:
    """The records of one tier called `name`. Safe to call from several threads; no call holds others up for long.

    Raises DirectoryLockedError when another process owns the directory.
    """

    def __init__(self, directory: Path, segment_bytes: int, name: str) -> None:
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._name = name
        self._lock = RLock()
        self._syncing = Lock()
        self._index = LogIndex()
        self._segments: dict[int, SegmentFile] = {}
        self._stuck: set[int] = set()
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
    def used_bytes(self) -> int:
        """Bytes of the pages that count."""
        return self._index.used_bytes

    @property
    def file_bytes(self) -> int:
        """Bytes of the segment files, records that no longer count included."""
        with self._lock:
            return sum(segment.end for segment in self._segments.values())

    def locate(self, keys: Sequence[PageKey]) -> list[Located | None]:
        """Where pages lie; a file stays readable for whoever has it. Raises CorruptPageError for one in doubt."""
        with self._lock:
            self._require_open()
            places = [self._index.pages.get(key) for key in keys]
            for key, place in zip(keys, places, strict=True):
                if place is not None and self._index.is_suspect(place):
                    raise CorruptPageError(
                        f"page {key.index} of session {key.session!r} may be out of date: a record written after it "
                        f"in {self._directory} cannot be read any more; its rows must be computed again"
                    )
            return [
                None if place is None else (place, self._segments[place.segment])
                for place in places
            ]

    def headers(self, session: str | None) -> list[PageHeader]:
        """The headers of all pages, or of those of one session."""
        with self._lock:
            self._require_open()
            located = [
                (key, place, self._segments[place.segment])
                for key, place in self._index.places(session)
            ]
        return [_header_at(key, place, segment) for key, place, segment in located]

    def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        """For each key whether the log has the page."""
        with self._lock:
            return [key in self._index.pages for key in keys]

    def append_page(self, key: PageKey, record: Blob) -> None:
        """Write a page at the end."""
        sequence = sequence_of(record)
        with self._lock:
            self._require_usable()
            self._index.add_page(key, self._append(record, sequence))

    def append_tombstones(self, keys: Sequence[PageKey]) -> bool:
        """Write that pages are no more, and return whether there were any. They are on the disk after `flush`."""
        with self._lock:
            self._require_usable()
            known = [key for key in keys if key in self._index.pages]
            for key in known:
                self._bury(key, self._index.pages[key].sequence)
            if known:
                self._roll_unneeded()
            return bool(known)

    def flush(self) -> None:
        """Return when every record written before is on the disk, and nothing is left of segments that may go."""
        with self._syncing:
            while self._sync():
                pass

    def worth_moving(self, dead_share: float, room: int) -> int | None:
        """The oldest segment of which at least that share no longer counts, and no more than `room` bytes do.

        The newest is none of them.
        """
        with self._lock:
            self._require_usable()
            for number in sorted(self._segments)[:-1]:
                end = self._segments[number].end
                needed = self._index.needed_bytes(number)
                worth = end - needed >= dead_share * end and needed <= room
                if worth and self._index.may_move(number) and number not in self._stuck:
                    return number
        return None

    def moves(self, number: int) -> Iterator[int]:
        """Write what counts in a segment again, a record at a time (its bytes), and unlink the segment at last.

        A record that cannot be read stays, and its segment with it. Whatever is interrupted leaves two copies.
        """
        for key in self._index_of(number):
            yield self._move(key, number)
        with self._lock:
            self._require_usable()
            for key in self._index.tombstones_in(number):
                self._bury(key, 0)
        self.flush()
        with self._lock:
            if number in self._segments:
                self._stuck.add(number)

    def seal_newest(self, dead_share: float) -> bool:
        """Go on in a new segment if at least that share of the newest no longer counts, so that it can be moved."""
        with self._lock:
            self._require_usable()
            newest = self._segments[max(self._segments)]
            dead = newest.end - self._index.needed_bytes(newest.number)
            if newest.end == 0 or dead < dead_share * newest.end:
                return False
            self._roll()
            return True

    def check(self) -> None:
        """Raise InvariantError when the books disagree with the files."""
        with self._lock:
            self._index.check()
            for key, place in self._index.pages.items():
                if (
                    place.segment not in self._segments
                    or place.offset + place.size > self._segments[place.segment].end
                ):
                    raise InvariantError(
                        f"tier {self._name}: page {key} lies outside the segment files: {place}"
                    )

    def close(self) -> None:
        """Let go of files and directory; the records stay on the disk. May be called twice."""
        with self._lock:
            self._segments.clear()
            self._failure = StoreClosedError(f"tier {self._name} is closed")
            if self._lock_descriptor >= 0:
                os.close(self._lock_descriptor)
                self._lock_descriptor = -1

    def _append(self, record: Blob, sequence: int) -> PagePlace:
        segment = self._segments[max(self._segments)]
        if segment.end and segment.end + len(record) > self._segment_bytes:
            segment = self._roll()
        offset = segment.append(record)
        self._unsynced = True
        return PagePlace(segment.number, offset, len(record), sequence)

    def _bury(self, key: PageKey, sequence: int) -> None:
        place = self._append(
            seal(PageHeader(key, sequence, 0, 0, kind=RecordKind.TOMBSTONE)), sequence
        )
        self._index.add_tombstone(key, place.segment)

    def _index_of(self, number: int) -> list[PageKey]:
        with self._lock:
            return sorted(
                self._index.pages_in(number), key=lambda key: self._index.pages[key].offset
            )

    def _move(self, key: PageKey, number: int) -> int:
        """Copy a page to the end of the log, if it is still in the segment; return the bytes written."""
        with self._lock:
            place = self._index.pages.get(key)
            segment = self._segments.get(number)
        if place is None or segment is None or place.segment != number:
            return 0
        record = segment.read(place.offset, place.size)
        check = RecordCheck()
        check.add(record)
        try:
            check.require(key, place.sequence)
        except PageError:
            return 0
        with self._lock:
            self._require_usable()
            # What was written or deleted meanwhile is newer than this copy would be.
            if self._index.pages.get(key) != place:
                return 0
            self._index.add_page(key, self._append(record, place.sequence))
        return place.size

    def _roll(self) -> SegmentFile:
        newest = self._segments[max(self._segments)]
        # Readers take only the newest segment for possibly torn, so an older one must be on the disk as a whole.
        newest.cut(newest.end)
        self._fsync(newest)
        return self._open_segment(newest.number + 1)

    def _roll_unneeded(self) -> None:
        """Go on in a new segment if nothing in the newest counts, so that it can be unlinked."""
        newest = self._segments[max(self._segments)]
        if newest.end and any(True for _ in self._index.removable([newest.number])):
            self._roll()

    def _sync(self) -> bool:
        """Bring to the disk what was written, while others may write; then unlink what may go, if there is any."""
        with self._lock:
            self._require_usable()
            newest = self._segments[max(self._segments)]
            end = newest.end
            unsynced = self._unsynced
            self._unsynced = False
            # What superseded their records is written by now, so it is on the disk in a moment.
            removable = list(self._index.removable(sorted(self._segments)[:-1]))
        if unsynced:
            self._fsync(newest)
        with self._lock:
            self._require_usable()
            if unsynced and newest.number == max(self._segments):
                # The marker is only a help to the next start, so a full disk may refuse it.
                with suppress(TierFullError):
                    newest.append(seal(PageHeader(_SYNC_KEY, end, 0, 0, kind=RecordKind.SYNC)))
            for number in removable:
                self._unlink(number)
            if removable:  # tombstones of pages that were in these are needed no more
                self._roll_unneeded()
        return bool(removable)

    def _fsync(self, segment: SegmentFile) -> None:
        try:
            segment.sync()
        except KvStoreError as error:
            # After a failed fsync the kernel may call the lost pages clean: a second try would prove nothing.
            self._failure = TierFailedError(
                f"tier {self._name}: a sync failed ({error}); restart to recover"
            )
            raise

    def _unlink(self, number: int) -> None:
        path = self._segments.pop(number).path
        with reported(path):
            path.unlink()
        _sync_directory(self._directory)
        self._index.forget(number)
        self._stuck.discard(number)

    def _open_segments(self) -> None:
        numbers = sorted(
            int(path.stem.removeprefix("segment-")) for path in self._directory.glob("segment-*.kv")
        )
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


def _header_at(key: PageKey, place: PagePlace, segment: SegmentFile) -> PageHeader:
    """A page's header; where it cannot be read any more, one that has none of the page's tokens: they are lost."""
    try:
        header = parse_header(segment.read(place.offset, HEADER_BYTES))
    except PageError:
        return PageHeader(
            key, place.sequence, valid_tokens=0, payload_bytes=place.size - HEADER_BYTES
        )
    return header
