"""The catalog of a process that takes requests."""

from kvrecall.cli.errors import CannotServe
from kvrecall.cli.settings import Settings
from services.errors import CatalogError
from services.sqlite_catalog import SqliteCatalog


async def open_catalog(settings: Settings) -> SqliteCatalog:
    """The catalog under `settings.data`, made if there is none. Raises CannotServe."""
    try:
        return await SqliteCatalog.open(settings.data / "catalog.sqlite3", settings.service.idempotency_records)
    except CatalogError as error:
        raise CannotServe(error.message) from error
