"""A catalog that lasts as long as a test."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from services.catalog.sqlite.catalog import SqliteCatalog


@asynccontextmanager
async def open_catalog() -> AsyncIterator[SqliteCatalog]:
    """Open an empty catalog in a temporary directory; both are gone at the end."""
    with TemporaryDirectory(prefix="kvrecall-") as folder:
        catalog = await SqliteCatalog.open(Path(folder) / "catalog.db")
        try:
            yield catalog
        finally:
            await catalog.close()
