"""Log of segment files in a directory: records are appended to the newest, whole files removed.

The index of valid records is in memory and is rebuilt at the start: from the index files of the
closed segments and the headers of the newest. A segment without valid records is unlinked once the
records that superseded its own are on the disk. The valid records of a mostly dead segment can be
moved to the end of the log (`move_records`), so that the segment is unlinked too.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock, RLock

from kvstore.errors import (
    CorruptPageError,
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
    read_sequence,
    seal,
)
from kvstore.tiers.nvme.directory import lock_directory, sync_directory
from kvstore.tiers.nvme.index import LogIndex, RecordLocation
from kvstore.tiers.nvme.segment import SegmentFile, map_os_errors, scan_newest
from kvstore.tiers.nvme.segment_index import (
    IndexEntry,
    SegmentEntries,
    from_scan,
    read_closed,
    remove_index,
    remove_others,
    write_index,
)

_SYNC_KEY = PageKey("", 0)
Located = tuple[RecordLocation, SegmentFile]


class SegmentLog:
    """Records of the tier called `name`. Safe to call from several threads; no call blocks long.

    Raises DirectoryLockedError when another process owns the directory, and PageVersionError when
    it has records of another format version.
    """

    def __init__(self, directory: Path, segment_bytes: int, name: str) -> None:
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._name = name
        self._lock, self._syncing = RLock(), Lock()
        self._index = LogIndex()
        self._segments: dict[int, SegmentFile] = {}
        self._newest_entries: list[IndexEntry] = []
        self._newest_damage: tuple[int, ...] = ()
        self._unmovable: set[int] = set()
        self._unsynced = False
        self._failure: KvStoreError | None = None
        with map_os_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)
        self._lock_descriptor = lock_directory(directory)
        try:
            self._open_segments()
        except BaseException:
            self.close()
            raise

    @property
    def used_bytes(self) -> int:
        """Bytes of the valid pages, headers included."""
        return self._index.used_bytes

    @property
    def file_bytes(self) -> int:
        """Bytes of the segment files, dead records included."""
        with self._lock:
            return sum(segment.end for segment in self._segments.values())

    def locate(self, keys: Sequence[PageKey]) -> list[Located | None]:
        """Locate pages; the returned files stay readable after they were unlinked.

        Raises CorruptPageError for a page that an unreadable record may have superseded.
        """
        with self._lock:
            self._require_open()
            locations = [self._index.get(key) for key in keys]
            for key, location in zip(keys, locations, strict=True):
                if location is not None and self._index.is_suspect(location):
                    raise CorruptPageError(
                        f"page {key.index} of session {key.session!r} may be out of date: a later "
                        f"record in {self._directory} is unreadable; its rows must be computed "
                        "again"
                    )
            return [
                None if location is None else (location, self._segments[location.segment])
                for location in locations
            ]

    def headers(self, session: str | None) -> list[PageHeader]:
        """Return the headers of all pages, or of those of one session."""
        return self._read_headers(lambda: self._index.locations(session))

    def session_headers(self) -> list[PageHeader]:
        """Return one header per session, of any of its pages."""
        return self._read_headers(self._index.one_per_session)

    def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        """Return whether the log has each page."""
        with self._lock:
            return [self._index.get(key) is not None for key in keys]

    def append_page(self, key: PageKey, record: Blob) -> None:
        """Append a page."""
        sequence = read_sequence(record)
        with self._lock:
            self._require_usable()
            self._index.add_page(key, self._append(RecordKind.PAGE, key, record, sequence))

    def append_tombstones(self, keys: Sequence[PageKey]) -> bool:
        """Delete pages by tombstones; return whether the log had any of them.

        The tombstones are on the disk after `flush`.
        """
        with self._lock:
            self._require_usable()
            found = False
            for key in keys:
                if (location := self._index.get(key)) is not None:
                    self._append_tombstone(key, location.sequence)
                    found = True
            if found:
                self._roll_if_dead()
            return found

    def flush(self) -> None:
        """Wait until all records are on the disk, and unlink all removable segments."""
        with self._syncing:
            while self._sync():
                pass

    def find_compactable(self, dead_share: float, room: int) -> int | None:
        """Number of the oldest segment with at least that share dead and at most `room` bytes live.

        The newest segment is never chosen.
        """
        with self._lock:
            self._require_usable()
            for number in sorted(self._segments)[:-1]:
                end = self._segments[number].end
                needed = self._index.needed_bytes(number)
                is_worthwhile = end - needed >= dead_share * end and needed <= room
                if is_worthwhile and self._index.may_move(number) and number not in self._unmovable:
                    return number
        return None

    def move_records(self, number: int) -> Iterator[int]:
        """Move a segment's valid records to the end of the log, then unlink the segment.

        Yields the bytes of each moved record. An unreadable record stays, and so does its segment.
        An interruption leaves two copies, which is harmless.
        """
        for key in self._live_keys(number):
            yield self._move(key, number)
        with self._lock:
            self._require_usable()
            for key in self._index.tombstones_in(number):
                self._append_tombstone(key, 0)
        self.flush()
        with self._lock:
            if number in self._segments:
                self._unmovable.add(number)

    def roll_newest(self, dead_share: float) -> bool:
        """Start a new segment if at least that share of the newest is dead, so it can be moved."""
        with self._lock:
            self._require_usable()
            newest = self._segments[max(self._segments)]
            dead = newest.end - self._index.needed_bytes(newest.number)
            if newest.end == 0 or dead < dead_share * newest.end:
                return False
            self._roll()
            return True

    def check(self) -> None:
        """Raise InvariantError when the index disagrees with the files."""
        with self._lock:
            self._index.check()
            for key, location in self._index.locations():
                if (
                    location.segment not in self._segments
                    or location.offset + location.size > self._segments[location.segment].end
                ):
                    raise InvariantError(
                        f"tier {self._name}: page {key} lies outside the segment files: {location}"
                    )

    def close(self) -> None:
        """Release files and directory; the records stay on the disk. May be called twice."""
        with self._lock:
            self._segments.clear()
            self._failure = StoreClosedError(f"tier {self._name} is closed")
            if self._lock_descriptor >= 0:
                os.close(self._lock_descriptor)
                self._lock_descriptor = -1

    def _read_headers(
        self, find: Callable[[], list[tuple[PageKey, RecordLocation]]]
    ) -> list[PageHeader]:
        with self._lock:
            self._require_open()
            located = [
                (key, location, self._segments[location.segment]) for key, location in find()
            ]
        return [_read_header(*each) for each in located]

    def _append(
        self, kind: RecordKind, key: PageKey, record: Blob, sequence: int
    ) -> RecordLocation:
        segment = self._segments[max(self._segments)]
        if segment.end and segment.end + len(record) > self._segment_bytes:
            segment = self._roll()
        offset = segment.append(record)
        self._newest_entries.append(
            IndexEntry(int(kind), key.session, key.index, sequence, offset, len(record))
        )
        self._unsynced = True
        return RecordLocation(segment.number, offset, len(record), sequence)

    def _append_tombstone(self, key: PageKey, sequence: int) -> None:
        record = seal(PageHeader(key, sequence, 0, 0, kind=RecordKind.TOMBSTONE))
        location = self._append(RecordKind.TOMBSTONE, key, record, sequence)
        self._index.add_tombstone(key, location.segment)

    def _live_keys(self, number: int) -> list[PageKey]:
        """Keys of the pages whose valid record is in a closed segment, in their order in it."""
        with self._lock:
            segment = self._segments.get(number)
        if segment is None:
            return []
        records = [
            (PageKey(entry.session, entry.page), (number, entry.offset))
            for entry in read_closed(segment).entries
            if entry.kind == RecordKind.PAGE
        ]
        with self._lock:
            return [
                key
                for key, position in records
                if (location := self._index.get(key)) is not None and location.position == position
            ]

    def _move(self, key: PageKey, number: int) -> int:
        """Copy a page, if it is still in the segment, to the log's end; return its bytes."""
        with self._lock:
            location = self._index.get(key)
            segment = self._segments.get(number)
        if location is None or segment is None or location.segment != number:
            return 0
        record = segment.read(location.offset, location.size)
        check = RecordCheck()
        check.add(record)
        try:
            check.require(key, location.sequence)
        except PageError:
            return 0
        with self._lock:
            self._require_usable()
            # A concurrent write or deletion is newer than this copy.
            if self._index.get(key) != location:
                return 0
            copy = self._append(RecordKind.PAGE, key, record, location.sequence)
            self._index.add_page(key, copy)
        return location.size

    def _roll(self) -> SegmentFile:
        newest = self._segments[max(self._segments)]
        # Recovery expects a torn tail only in the newest segment; older ones must be on the disk.
        newest.truncate(newest.end)
        self._fsync(newest)
        write_index(newest, SegmentEntries(self._newest_entries, self._newest_damage, newest.end))
        segment = self._add_segment(newest.number + 1)
        sync_directory(self._directory)
        return segment

    def _roll_if_dead(self) -> None:
        """Start a new segment if the newest has no valid record, so that it can be unlinked."""
        newest = self._segments[max(self._segments)]
        if newest.end and any(True for _ in self._index.removable([newest.number])):
            self._roll()

    def _sync(self) -> bool:
        """Sync while others may write, then unlink removable segments; return whether any were."""
        with self._lock:
            self._require_usable()
            newest = self._segments[max(self._segments)]
            end = newest.end
            unsynced = self._unsynced
            self._unsynced = False
            # The records that superseded theirs are written, and on the disk after the sync below.
            removable = list(self._index.removable(sorted(self._segments)[:-1]))
        if unsynced:
            self._fsync(newest)
        with self._lock:
            self._require_usable()
            if unsynced and newest.number == max(self._segments):
                # The marker only speeds up recovery, so a full disk may refuse it.
                with suppress(TierFullError):
                    newest.append(seal(PageHeader(_SYNC_KEY, end, 0, 0, kind=RecordKind.SYNC)))
            for number in removable:
                self._unlink(number)
            if removable:  # Tombstones of pages in these segments are not needed any more.
                self._roll_if_dead()
        return bool(removable)

    def _fsync(self, segment: SegmentFile) -> None:
        try:
            segment.sync()
        except KvStoreError as error:
            # After a failed fsync the kernel may mark lost pages as clean: a retry proves nothing.
            self._failure = TierFailedError(
                f"tier {self._name}: a sync failed ({error}); restart to recover"
            )
            raise

    def _unlink(self, number: int) -> None:
        segment = self._segments.pop(number)
        with map_os_errors(segment.path):
            segment.path.unlink()
        remove_index(segment)
        sync_directory(self._directory)
        self._index.remove_segment(number)
        self._unmovable.discard(number)

    def _open_segments(self) -> None:
        numbers = sorted(
            int(path.stem.removeprefix("segment-")) for path in self._directory.glob("segment-*.kv")
        )
        for number in numbers:
            segment = self._add_segment(number)
            if number == numbers[-1]:
                found = from_scan(scan_newest(segment))
                segment.truncate(found.end)
                self._newest_entries = list(found.entries)
                self._newest_damage = found.damaged
            else:
                found = read_closed(segment)
                if found.end < segment.end:
                    self._index.add_damage(number, found.end)
            self._index_entries(number, found)
        remove_others(self._directory, [self._segments[number] for number in numbers[:-1]])
        if not numbers:
            self._add_segment(1)
        sync_directory(self._directory)

    def _add_segment(self, number: int) -> SegmentFile:
        segment = SegmentFile(self._directory / f"segment-{number:08d}.kv", number)
        self._segments[number] = segment
        self._newest_entries, self._newest_damage = [], ()
        return segment

    def _index_entries(self, number: int, found: SegmentEntries) -> None:
        for offset in found.damaged:
            self._index.add_damage(number, offset)
        for kind, session, page, sequence, offset, size in found.entries:
            key = PageKey(session, page)
            if kind == RecordKind.PAGE:
                self._index.add_page(key, RecordLocation(number, offset, size, sequence))
            else:
                self._index.add_tombstone(key, number)

    def _require_open(self) -> None:
        if not self._segments and self._failure is not None:
            raise self._failure

    def _require_usable(self) -> None:
        if self._failure is not None:
            raise self._failure


def _read_header(key: PageKey, location: RecordLocation, segment: SegmentFile) -> PageHeader:
    """Read a page's header; an unreadable one becomes a header without tokens."""
    try:
        header = parse_header(segment.read(location.offset, HEADER_BYTES))
    except PageError:
        return PageHeader(
            key, location.sequence, valid_tokens=0, payload_bytes=location.size - HEADER_BYTES
        )
    return header
