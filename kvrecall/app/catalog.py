"""The catalog of a process that serves, and its upgrade."""

import asyncio
from pathlib import Path

import structlog

from kvrecall.app.errors import CannotServe
from kvrecall.app.redis import read_refusal, redis_client
from kvrecall.app.settings import Settings
from kvrecall.domain.errors import CatalogError
from kvstore.errors import TierSettingsError
from services.catalog.base import Catalog
from services.catalog.redis.catalog import RedisCatalog
from services.catalog.sqlite.catalog import SqliteCatalog
from services.catalog.versions import CatalogUpgrade

_log = structlog.get_logger("kvrecall.catalog")


async def open_catalog(settings: Settings) -> Catalog:
    """Open the catalog at `settings.catalog_url`, else the file under `settings.data`.

    A missing catalog is created, one of an older version upgraded, which is logged. Raises
    CannotServe.
    """
    catalog = await _open(settings)
    upgrade = catalog.upgrade
    if upgrade.upgraded:
        _log.info(
            "catalog upgraded",
            catalog=upgrade.location,
            found=upgrade.found,
            version=upgrade.version,
            backup=None if upgrade.backup is None else str(upgrade.backup),
        )
    return catalog


async def upgrade_catalog(settings: Settings) -> tuple[CatalogUpgrade, int]:
    """Upgrade the catalog; return what was done and the number of its sessions.

    Raises CannotServe.
    """
    catalog = await _open(settings)
    try:
        return catalog.upgrade, len(await catalog.sessions.get_ids())
    except CatalogError as error:
        raise CannotServe(error.message) from error
    finally:
        await catalog.close()


def get_path(settings: Settings) -> Path:
    """Return the file of a catalog that is not in Redis."""
    return settings.data / "catalog.sqlite3"


async def _open(settings: Settings) -> SqliteCatalog | RedisCatalog:
    try:
        if settings.catalog_url is None:
            return await SqliteCatalog.open(get_path(settings), settings.catalog_reserve_bytes)
        client = redis_client(settings.catalog_url.get_secret_value())
        return await RedisCatalog.open(client, f"{settings.store.redis_namespace}:catalog")
    except CatalogError as error:
        url = settings.catalog_url
        said = "" if url is None else await asyncio.to_thread(read_refusal, url.get_secret_value())
        raise CannotServe(f"{error.message}; it says: {said}" if said else error.message) from error
    except TierSettingsError as error:
        raise CannotServe(f"KVRECALL_CATALOG_URL: {error}") from error
