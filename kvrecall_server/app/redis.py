"""Redis clients for the catalog and the registry, from the same URLs as the Redis tier's."""

import socket
from collections.abc import Callable
from contextlib import suppress
from itertools import cycle
from typing import Any

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff

from kvstore.tiers.redis.address import RedisAddress, parse_address

_REFUSAL_BYTES = 1024


def redis_client(url: str, timeout_seconds: float = 5.0) -> Redis | RedisCluster:
    """A client of one server, a sentinel-monitored primary or a cluster (see `parse_address`).

    It connects at the first command, returns bytes, and retries nothing: its callers know which
    commands may run twice. Raises TierSettingsError for a malformed URL.
    """
    address = parse_address(url)
    common = _build_options(address, timeout_seconds)
    if not _is_cluster(address):
        return _client_of_server(address, common)
    return RedisCluster(
        startup_nodes=[ClusterNode(host, port) for host, port in address.hosts], **common
    )


def server_clients(url: str, timeout_seconds: float = 5.0) -> Callable[[], Redis]:
    """Return a function that makes clients of one server each, to publish and subscribe.

    Of a cluster it takes the named servers in turn: each passes on what is published at any. Raises
    TierSettingsError for a malformed URL.
    """
    address = parse_address(url)
    common = _build_options(address, timeout_seconds)
    if not _is_cluster(address):
        return lambda: _client_of_server(address, common)
    hosts = cycle(address.hosts)

    def make() -> Redis:
        host, port = next(hosts)
        return Redis(host=host, port=port, **common)

    return make


def read_refusal(url: str, timeout_seconds: float = 1.0) -> str:
    """Read what a server says to a connection that it refuses, as one in protected mode does.

    redis-py has written before it reads, and knows only that the connection is lost. Empty where the
    server says nothing, or is one of several.
    """
    address = parse_address(url)
    if "+" in address.scheme or not address.hosts or address.scheme == "rediss":
        return ""
    with suppress(OSError):
        with socket.create_connection(address.hosts[0], timeout_seconds) as connection:
            connection.settimeout(timeout_seconds)
            said = connection.recv(_REFUSAL_BYTES)
        if said.startswith(b"-"):
            return said[1:].splitlines()[0].decode(errors="replace")
    return ""


def _build_options(address: RedisAddress, timeout_seconds: float) -> dict[str, Any]:
    common: dict[str, Any] = {
        "socket_timeout": 2 * timeout_seconds,  # WAIT alone may take one
        "socket_connect_timeout": timeout_seconds,
        "protocol": 2,
        "retry": Retry(NoBackoff(), 0),
    }
    if "+" not in address.scheme:
        return common
    common |= {"username": address.username, "password": address.password}
    return common | ({"ssl": True} if address.scheme.startswith("rediss") else {})


def _is_cluster(address: RedisAddress) -> bool:
    return "+" in address.scheme and not address.scheme.endswith("+sentinel")


def _client_of_server(address: RedisAddress, common: dict[str, Any]) -> Redis:
    """A client of one server, or of a primary behind sentinels."""
    if "+" not in address.scheme:
        return Redis.from_url(address.url, **common)
    return _behind_sentinels(address, common)


def _behind_sentinels(address: RedisAddress, common: dict[str, Any]) -> Redis:
    own = {"username": None, "password": address.sentinel_password}
    sentinel = Sentinel(list(address.hosts), sentinel_kwargs=common | own, **common)
    client: Redis = sentinel.master_for(address.path.strip("/"))
    return client
