"""The last of the disk of a SQLite catalog, which is left to deletions.

SQLite needs room to delete: what is freed goes to the file's free pages, and the change to the log
first. So writes that store more are refused while some room is left, and a file beside the catalog
takes as much again: it is given up once a deletion finds no room, because something else has filled
the disk.
"""

import os
import sqlite3
from pathlib import Path

from kvrecall.domain.errors import StorageFull
from services.catalog.sqlite.storage.queries import fetch_value

# Of the reserve: what writes that store more leave on the disk, and what they leave at the least
# where the file has free pages of its own.
_LEFT_SHARE = 0.5
_LEAST_SHARE = 0.125


class DiskReserve:
    """A file of `size` bytes beside the catalog `path`, as far as there is room; 0: no reserve."""

    def __init__(self, path: Path, size: int) -> None:
        self._path = path.with_name(f"{path.name}.reserve")
        self._folder = path.parent
        self._size = size

    def fill(self) -> None:
        """Take the reserve from the disk, if there is room for it and for more.

        Without it, as under a disk quota, writes leave more of the disk instead.
        """
        if self._size and not self._is_whole and self._free >= (1 + _LEAST_SHARE) * self._size:
            try:
                file = os.open(self._path, os.O_CREAT | os.O_WRONLY, 0o600)
                try:
                    os.posix_fallocate(file, 0, self._size)
                finally:
                    os.close(file)
            except OSError:
                self.release()

    def release(self) -> bool:
        """Give the reserve to the disk; return whether there was one."""
        try:
            self._path.unlink()
        except OSError:
            return False
        return True

    def has_room(self, db: sqlite3.Connection) -> bool:
        """Return whether more may be stored."""
        if not self._size:
            return True
        self.fill()
        free = self._free
        left = self._size * (_LEFT_SHARE if self._is_whole else 1 + _LEFT_SHARE)
        if free >= left:
            return True
        pages = fetch_value(db, "PRAGMA freelist_count") * fetch_value(db, "PRAGMA page_size")
        return free >= _LEAST_SHARE * self._size and free + pages >= left

    def require_room(self, db: sqlite3.Connection) -> None:
        """Raise StorageFull unless more may be stored."""
        if not self.has_room(db):
            raise build_full(f"{self._folder} has {self._free >> 20} MiB left")

    @property
    def _is_whole(self) -> bool:
        try:
            return self._path.stat().st_size >= self._size
        except FileNotFoundError:
            return False

    @property
    def _free(self) -> int:
        found = os.statvfs(self._folder)
        return found.f_bavail * found.f_frsize


def build_full(cause: str) -> StorageFull:
    """Build the refusal of a write that would store more."""
    return StorageFull(
        f"the catalog stores no more, as its disk is nearly full ({cause}): delete sessions, "
        "conversations or responses, or free the disk"
    )


def is_full(error: sqlite3.Error) -> bool:
    """Return whether SQLite found no room on the disk."""
    return isinstance(error, sqlite3.OperationalError) and (
        error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_FULL
    )
