"""Rates of keys and tenants: counted in the catalog's Redis, or in this process."""

from typing import Any

from limits.aio.storage import (
    MemoryStorage,
    RedisClusterStorage,
    RedisSentinelStorage,
    RedisStorage,
    Storage,
)

from kvrecall_server.app.errors import CannotServe
from kvrecall_server.app.settings import Settings
from kvstore.errors import TierSettingsError
from kvstore.tiers.redis.address import parse_address
from services.access.rates import Rates

_TIMEOUT_SECONDS = 2.0


def build_rates(settings: Settings) -> Rates | None:
    """Build the rates that the settings ask for, None if they ask for none. Raises CannotServe."""
    access = settings.access
    limits = (
        access.key_requests_per_minute,
        access.key_tokens_per_minute,
        access.tenant_requests_per_minute,
        access.tenant_tokens_per_minute,
    )
    if not any(limits):
        return None
    if settings.catalog_url is None:
        return Rates(MemoryStorage(), access)
    prefix = f"{settings.store.redis_namespace}:rates"
    try:
        storage = build_redis_storage(settings.catalog_url.get_secret_value(), prefix)
    except TierSettingsError as error:
        raise CannotServe(f"KVRECALL_CATALOG_URL: {error}") from error
    return Rates(storage, access)


def build_redis_storage(url: str, prefix: str) -> Storage:
    """Build the storage at a Redis URL, as `parse_address` reads it. It connects at first use.

    Raises TierSettingsError for a malformed URL.
    """
    address = parse_address(url)
    options: dict[str, Any] = {
        "wrap_exceptions": True,
        "implementation": "redispy",
        "key_prefix": prefix,
        "socket_timeout": _TIMEOUT_SECONDS,
        "socket_connect_timeout": _TIMEOUT_SECONDS,
    }
    if address.scheme == "unix":
        return RedisStorage(address.url.replace("unix", "redis+unix", 1), **options)
    if "+" not in address.scheme:
        return RedisStorage(address.url, **options)
    options |= {"username": address.username, "password": address.password}
    options = {name: value for name, value in options.items() if value is not None}
    if address.scheme.startswith("rediss"):
        options["ssl"] = True
    hosts = ",".join(f"{host}:{port}" for host, port in address.hosts)
    if address.scheme.endswith("+cluster"):
        return RedisClusterStorage(f"redis+cluster://{hosts}", **options)
    own: dict[str, Any] = {"username": None, "password": address.sentinel_password}
    return RedisSentinelStorage(
        f"redis+sentinel://{hosts}{address.path}",
        use_replicas=False,
        sentinel_kwargs=own,
        **options,
    )
