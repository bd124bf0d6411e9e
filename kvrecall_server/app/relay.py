"""The way of events between the gateways that share a catalog."""

from kvrecall_server.app.errors import CannotServe
from kvrecall_server.app.redis import server_clients
from kvrecall_server.app.settings import Settings
from kvstore.errors import TierSettingsError
from services.feed.relay import RedisRelay


def build_relay(settings: Settings) -> RedisRelay | None:
    """Build the relay of a gateway; None where the catalog is a file, which has one gateway.

    Raises CannotServe.
    """
    if settings.catalog_url is None:
        return None
    try:
        connect = server_clients(settings.catalog_url.get_secret_value())
    except TierSettingsError as error:
        raise CannotServe(f"KVRECALL_CATALOG_URL: {error}") from error
    return RedisRelay(connect, f"{settings.store.redis_namespace}:catalog:events")
