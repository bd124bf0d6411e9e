"""Log of segment files in a directory: records are appended to the newest, whole files removed.

The index of valid records is in memory and is rebuilt at the start: from the index files of the
closed segments and the headers of the newest. Order in the log decides: of a page's copies the last one
is valid, and a tombstone deletes those before it. What cannot be read is left out: a page is then
missing, or, where it was a tombstone, a deleted page is there again, with the rows that its id names.

A segment without valid records is unlinked once the records that came after its own are on the disk.
The valid records of a mostly dead segment can be moved to the end of the log (`move_records`), so that
the segment is unlinked too.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock, RLock

from kvstore.errors import (
    InvariantError,
    KvStoreError,
    PageError,
    StoreClosedError,
    TierFailedError,
    TierFullError,
)
from kvstore.format.page import (
    HEADER_BYTES,
    ID_BYTES,
    Blob,
    PageHeader,
    PageId,
    RecordCheck,
    RecordKind,
    parse_header,
    seal,
)
from kvstore.tiers.base import was_written_before
from kvstore.tiers.nvme.directory import lock_directory, sync_directory
from kvstore.tiers.nvme.index import LogIndex, RecordLocation
from kvstore.tiers.nvme.segment import SegmentFile, map_os_errors, scan_newest
from kvstore.tiers.nvme.segment_index import (
    Entry,
    IndexEntry,
    from_scan,
    read_closed,
    remove_index,
    remove_others,
    write_index,
)

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

    def locate(self, ids: Sequence[PageId]) -> list[Located | None]:
        """Locate pages; the returned files stay readable after they were unlinked."""
        with self._lock:
            self._require_open()
            locations = [self._index.get(page_id) for page_id in ids]
            return [
                None if location is None else (location, self._segments[location.segment])
                for location in locations
            ]

    def headers(self) -> Iterator[PageHeader]:
        """Yield the headers of the pages that there are; of an unreadable one `page_tokens` is 0.

        Without pages that are deleted before their turn.
        """
        with self._lock:
            self._require_open()
            ids = self._index.ids()
        return (
            _read_header(page_id, *located)
            for page_id in ids
            for located in self.locate([page_id])
            if located is not None
        )

    def list_ids(self, written_before: int) -> list[PageId]:
        """Return the ids of the pages that were written before a time in unix seconds."""
        with self._lock:
            self._require_open()
            times = self._index.times()
        return [page_id for page_id, at in times if was_written_before(at, written_before)]

    def contains(self, ids: Sequence[PageId]) -> list[bool]:
        """Return whether the log has each page, and it was not found damaged."""
        with self._lock:
            self._require_open()
            return [self._index.has_intact(page_id) for page_id in ids]

    def mark_damaged(self, page_id: PageId, location: RecordLocation) -> None:
        """Record that a page's record is damaged: the next copy that is appended replaces it."""
        with self._lock:
            self._index.mark_damaged(page_id, location)

    def append_page(self, page_id: PageId, record: Blob) -> None:
        """Append a page."""
        written_at = parse_header(record).written_at
        with self._lock:
            self._require_usable()
            copy = self._append(RecordKind.PAGE, page_id, record, written_at)
            self._index.add_page(page_id, copy)

    def append_tombstones(self, ids: Sequence[PageId]) -> None:
        """Delete pages by tombstones, which are on the disk after `flush`; unknown ids are ignored."""
        with self._lock:
            self._require_usable()
            known = [page_id for page_id in ids if self._index.get(page_id) is not None]
            for page_id in known:
                self._append_tombstone(page_id)
            if known:
                self._roll_if_dead()

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
                if is_worthwhile and number not in self._unmovable:
                    return number
        return None

    def move_records(self, number: int) -> Iterator[int]:
        """Move a segment's valid records to the end of the log, then unlink the segment.

        Yields the bytes of each moved record. An unreadable record stays, and so does its segment.
        An interruption leaves two copies, which is harmless.
        """
        for page_id in self._list_live(number):
            yield self._move(page_id, number)
        with self._lock:
            self._require_usable()
            for page_id in self._index.tombstones_in(number):
                self._append_tombstone(page_id)
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
            for page_id, location in self._index.locations():
                if (
                    location.segment not in self._segments
                    or location.offset + location.size > self._segments[location.segment].end
                ):
                    raise InvariantError(
                        f"tier {self._name}: page {page_id.hex()} lies outside the segment files: "
                        f"{location}"
                    )

    def close(self) -> None:
        """Release files and directory; the records stay on the disk. May be called twice."""
        with self._lock:
            self._segments.clear()
            self._failure = StoreClosedError(f"tier {self._name} is closed")
            if self._lock_descriptor >= 0:
                os.close(self._lock_descriptor)
                self._lock_descriptor = -1

    def _append(
        self, kind: RecordKind, page_id: PageId, record: Blob, written_at: int
    ) -> RecordLocation:
        segment = self._segments[max(self._segments)]
        if segment.end and segment.end + len(record) > self._segment_bytes:
            segment = self._roll()
        offset = segment.append(record)
        self._newest_entries.append(IndexEntry(int(kind), page_id, offset, len(record), written_at))
        self._unsynced = True
        return RecordLocation(segment.number, offset, len(record), written_at)

    def _append_tombstone(self, page_id: PageId) -> None:
        record = seal(PageHeader(page_id, kind=RecordKind.TOMBSTONE))
        location = self._append(RecordKind.TOMBSTONE, page_id, record, 0)
        self._index.add_tombstone(page_id, location.segment)

    def _list_live(self, number: int) -> list[PageId]:
        """Pages whose valid record is in a closed segment, in their order in it."""
        with self._lock:
            segment = self._segments.get(number)
        if segment is None:
            return []
        records = [
            (page_id, (number, offset))
            for kind, page_id, offset, _, _ in read_closed(segment)
            if kind == RecordKind.PAGE
        ]
        with self._lock:
            return [
                page_id
                for page_id, position in records
                if (found := self._index.get(page_id)) is not None and found.position == position
            ]

    def _move(self, page_id: PageId, number: int) -> int:
        """Copy a page, if it is still in the segment, to the log's end; return its bytes."""
        with self._lock:
            location = self._index.get(page_id)
            segment = self._segments.get(number)
        if location is None or segment is None or location.segment != number:
            return 0
        record = segment.read(location.offset, location.size)
        check = RecordCheck()
        check.add(record)
        try:
            check.require(page_id)
        except PageError:
            self.mark_damaged(page_id, location)
            return 0
        with self._lock:
            self._require_usable()
            # It may have been deleted, or put anew, meanwhile.
            if self._index.get(page_id) != location:
                return 0
            copy = self._append(RecordKind.PAGE, page_id, record, location.written_at)
            self._index.add_page(page_id, copy)
        return location.size

    def _roll(self) -> SegmentFile:
        newest = self._segments[max(self._segments)]
        # Recovery expects a torn tail only in the newest segment; older ones must be on the disk.
        newest.truncate(newest.end)
        self._fsync(newest)
        write_index(newest, self._newest_entries)
        segment = self._add_segment(newest.number + 1)
        sync_directory(self._directory)
        return segment

    def _roll_if_dead(self) -> None:
        """Start a new segment if the newest has no valid record, so that it can be unlinked."""
        newest = self._segments[max(self._segments)]
        if newest.end and self._index.is_removable(newest.number):
            self._roll()

    def _sync(self) -> bool:
        """Sync while others may write, then unlink removable segments; return whether any were."""
        with self._lock:
            self._require_usable()
            newest = self._segments[max(self._segments)]
            end = newest.end
            unsynced = self._unsynced
            self._unsynced = False
            # The records that came after theirs are written, and on the disk after the sync below.
            removable = [
                number
                for number in sorted(self._segments)
                if number != newest.number and self._index.is_removable(number)
            ]
        if unsynced:
            self._fsync(newest)
        with self._lock:
            self._require_usable()
            if unsynced and newest.number == max(self._segments):
                # The marker only speeds up recovery, so a full disk may refuse it.
                with suppress(TierFullError):
                    marker = PageHeader(bytes(ID_BYTES), kind=RecordKind.SYNC, synced_bytes=end)
                    newest.append(seal(marker))
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
                scan = scan_newest(segment)
                segment.truncate(scan.end)
                # What an earlier process wrote last may be in the system's memory alone.
                self._unsynced = scan.end > 0
                self._newest_entries = from_scan(scan)
                self._index_entries(number, self._newest_entries)
            else:
                self._index_entries(number, read_closed(segment))
        remove_others(self._directory, [self._segments[number] for number in numbers[:-1]])
        if not numbers:
            self._add_segment(1)
        sync_directory(self._directory)

    def _add_segment(self, number: int) -> SegmentFile:
        segment = SegmentFile(self._directory / f"segment-{number:08d}.kv", number)
        self._segments[number] = segment
        self._newest_entries = []
        return segment

    def _index_entries(self, number: int, entries: Iterable[Entry]) -> None:
        for kind, page_id, offset, size, written_at in entries:
            if kind == RecordKind.PAGE:
                self._index.add_page(page_id, RecordLocation(number, offset, size, written_at))
            else:
                self._index.add_tombstone(page_id, number)

    def _require_open(self) -> None:
        if not self._segments and self._failure is not None:
            raise self._failure

    def _require_usable(self) -> None:
        if self._failure is not None:
            raise self._failure


def _read_header(page_id: PageId, location: RecordLocation, segment: SegmentFile) -> PageHeader:
    """Read a page's header; an unreadable one becomes a header without the fields of a layout."""
    with suppress(PageError):
        header = parse_header(segment.read(location.offset, HEADER_BYTES))
        if header.id == page_id:
            return header
    return PageHeader(page_id, location.size - HEADER_BYTES, location.written_at)
