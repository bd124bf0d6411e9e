"""A lock on the SQLite catalog's file: one process uses it at a time.

SQLite would let several write, but claims are kept in the memory of one. The lock is on a file
beside the catalog, so that tools that only read it (`sqlite3 .backup`) are not kept out.
"""

import fcntl
from pathlib import Path

from kvrecall.domain.errors import CatalogError


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
