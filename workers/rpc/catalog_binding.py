"""The catalog that a worker's pages belong to, in a file beside them.

Pages without their catalog are rows of no session: a gateway with another or an empty catalog would
delete all of them as unknown.
"""

import os
from pathlib import Path
from threading import Lock

from workers.errors import CatalogMismatch


class CatalogBinding:
    """The id of the catalog whose sessions' pages lie beside the file `path`.

    The first catalog that asks binds them. Safe to call from several threads.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = Lock()
        self._bound = path.read_text("utf-8").strip() if path.exists() else ""

    @property
    def bound(self) -> str:
        """The id of the catalog that the pages belong to; empty if they have none yet."""
        return self._bound

    def require(self, catalog: str) -> None:
        """Bind the pages to this catalog if they have none; an empty id is not compared.

        Raises CatalogMismatch when they belong to another one, OSError when the file cannot be
        written.
        """
        if not catalog or catalog == self._bound:
            return
        with self._lock:
            if not self._bound:
                _write_durably(self._path, f"{catalog}\n")
                self._bound = catalog
        if catalog != self._bound:
            raise CatalogMismatch(
                f"the pages in {self._path.parent} belong to the sessions of catalog {self._bound}, "
                f"and this gateway's catalog is {catalog}: start the gateway with that catalog, or "
                f"this worker with another data directory. To give the pages to the gateway's "
                f"catalog, which deletes those of all sessions that it does not know, stop the "
                f"worker and remove {self._path}"
            )


def _write_durably(path: Path, text: str) -> None:
    """Write a small file, which appears whole or not at all, and is there after a power loss."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
