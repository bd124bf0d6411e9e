"""The file of a SQLite catalog: its lock, and its identity.

SQLite would let several processes write, but claims are kept in the memory of one. The lock is on a
file beside the catalog, so that tools that only read it (`sqlite3 .backup`) are not kept out. The
identity is required by whatever reads or changes the catalog: a file that is deleted or replaced
under a running process stays open in it, and its commits would go to a file that nobody finds again.
"""

import fcntl
import os
import sqlite3
from pathlib import Path

from kvrecall.domain.errors import CatalogError
from services.catalog.versions import build_catalog_replaced


class FileLock:
    """An exclusive lock that ends with `release` or with the process."""

    def __init__(self, path: Path) -> None:
        """Take the lock of the catalog at `path`. Raises CatalogError when it is taken, OSError."""
        name = path.with_name(f"{path.name}.lock")
        self._file = name.open("ab")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise CatalogError(
                f"the catalog {path} is in use by another process; stop it, or name another file"
            ) from error

    def release(self) -> None:
        """Release the lock; its file stays, as another process may be about to lock it."""
        self._file.close()


class FileIdentity:
    """Which file a catalog's path named when it was opened, and the id and the secret in it, as it is stored."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        """Note the file that `connection` has just opened. Raises OSError, sqlite3.Error."""
        self._path = path
        self._file = _identify(path)
        self.id, self.secret = connection.execute("SELECT id, secret FROM catalog_id").fetchone()

    def require(self) -> None:
        """Check that the path still names the file. Raises CatalogReplaced."""
        try:
            found = "is another file now" if _identify(self._path) != self._file else ""
        except OSError as error:
            found = f"is gone ({error.strerror})"
        if found:
            raise build_catalog_replaced(str(self._path), self.id, found)


def _identify(path: Path) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino
