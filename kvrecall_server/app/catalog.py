"""The catalog of a process that serves."""

import asyncio
from pathlib import Path

from kvrecall.domain.errors import CatalogError
from kvrecall_server.app.encryption import load_keyring
from kvrecall_server.app.errors import CannotServe
from kvrecall_server.app.redis import read_refusal, redis_client
from kvrecall_server.app.settings import Settings
from kvstore.errors import TierSettingsError
from services.catalog.base import Catalog
from services.catalog.redis.catalog import RedisCatalog
from services.catalog.sqlite.catalog import SqliteCatalog


async def open_catalog(settings: Settings) -> Catalog:
    """Open the catalog at `settings.catalog_url`, else the file under `settings.data`.

    A missing catalog is created, one of another version, or encrypted with other keys, refused. Raises
    CannotServe.
    """
    keyring = load_keyring(settings)
    try:
        if settings.catalog_url is None:
            reserve = settings.catalog_reserve_bytes
            return await SqliteCatalog.open(get_path(settings), reserve, keyring)
        client = redis_client(settings.catalog_url.get_secret_value())
        namespace = f"{settings.store.redis_namespace}:catalog"
        return await RedisCatalog.open(client, namespace, keyring=keyring)
    except CatalogError as error:
        url = settings.catalog_url
        said = "" if url is None else await asyncio.to_thread(read_refusal, url.get_secret_value())
        raise CannotServe(f"{error.message}; it says: {said}" if said else error.message) from error
    except TierSettingsError as error:
        raise CannotServe(f"KVRECALL_CATALOG_URL: {error}") from error


def get_path(settings: Settings) -> Path:
    """Return the file of a catalog that is not in Redis."""
    return settings.data / "catalog.sqlite3"
