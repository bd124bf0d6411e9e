"""The identity of the SQLite catalog's file: required by whatever reads or changes it.

A file that is deleted or replaced under a running process stays open in it: its commits would go to
a file that nobody finds again.
"""

import os
import sqlite3
from pathlib import Path

from services.catalog.versions import build_catalog_replaced


class FileIdentity:
    """Which file a catalog's path named when it was opened, and the id in it."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        """Note the file that `connection` has just opened. Raises OSError, sqlite3.Error."""
        self._path = path
        self._file = _identify(path)
        (self.id,) = connection.execute("SELECT id FROM catalog_id").fetchone()

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
