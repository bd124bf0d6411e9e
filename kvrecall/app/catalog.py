"""The catalog of a process that takes requests."""

from kvrecall.app.errors import CannotServe
from kvrecall.app.redis import redis_client
from kvrecall.app.settings import Settings
from kvrecall.domain.errors import CatalogError
from kvstore.errors import TierSettingsError
from services.catalog.base import Catalog
from services.catalog.redis.catalog import RedisCatalog
from services.catalog.sqlite.catalog import SqliteCatalog


async def open_catalog(settings: Settings) -> Catalog:
    """The catalog at `settings.catalog_url`, else the one under `settings.data`; made if there is none.

    Raises CannotServe.
    """
    try:
        if settings.catalog_url is None:
            return await SqliteCatalog.open(
                settings.data / "catalog.sqlite3", settings.service.idempotency_records
            )
        client = redis_client(settings.catalog_url.get_secret_value())
        return await RedisCatalog.open(client, f"{settings.store.redis_namespace}:catalog")
    except CatalogError as error:
        raise CannotServe(error.message) from error
    except TierSettingsError as error:
        raise CannotServe(f"KVRECALL_CATALOG_URL: {error}") from error
