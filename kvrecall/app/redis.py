"""Connections to Redis for whatever is no tier, from the same URLs."""

from typing import Any

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff

from kvstore.tiers.redis.address import RedisAddress, parse_address


def redis_client(url: str, timeout_seconds: float = 5.0) -> Redis | RedisCluster:
    """A client of what `url` names (forms: `parse_address`), which answers with bytes and connects when it is used.

    It tries nothing again by itself: its users know what may be done twice. Raises TierSettingsError for a URL that
    cannot be read.
    """
    address = parse_address(url)
    common: dict[str, Any] = {
        "socket_timeout": 2 * timeout_seconds,  # WAIT alone may take one
        "socket_connect_timeout": timeout_seconds,
        "protocol": 2,
        "retry": Retry(NoBackoff(), 0),
    }
    if "+" not in address.scheme:
        return Redis.from_url(address.url, **common)
    common |= {"username": address.username, "password": address.password}
    if address.scheme.startswith("rediss"):
        common["ssl"] = True
    if address.scheme.endswith("+sentinel"):
        return _behind_sentinels(address, common)
    return RedisCluster(
        startup_nodes=[ClusterNode(host, port) for host, port in address.hosts], **common
    )


def _behind_sentinels(address: RedisAddress, common: dict[str, Any]) -> Redis:
    own = {"username": None, "password": address.sentinel_password}
    sentinel = Sentinel(list(address.hosts), sentinel_kwargs=common | own, **common)
    client: Redis = sentinel.master_for(address.path.strip("/"))
    return client
