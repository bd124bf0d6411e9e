"""Address at which gateways reach a worker: the settings', or that of the way to the catalog's Redis."""

import socket
from typing import Any

from kvrecall.domain.addresses import is_loopback
from kvrecall_server.app.errors import CannotServe
from kvrecall_server.app.settings import Settings
from kvstore.errors import TierSettingsError
from kvstore.tiers.redis.address import RedisAddress, parse_address

AUTO = "auto"
_NEEDS_REDIS = (
    "--advertise auto is the address of the interface that reaches the catalog's Redis: set "
    "KVRECALL_CATALOG_URL to one at HOST:PORT, or give --advertise HOST:PORT"
)


def get_advertised_address(settings: Settings, listening: str) -> str:
    """Return HOST:PORT for gateways; `listening` is the worker's own, with the bound port.

    Raises CannotServe if `auto` finds none, or one that the worker does not listen on.
    """
    if settings.server.advertise != AUTO:
        return settings.server.advertise or listening
    if settings.catalog_url is None:
        raise CannotServe(_NEEDS_REDIS)
    try:
        redis = parse_address(settings.catalog_url.get_secret_value())
    except TierSettingsError as error:
        raise CannotServe(str(error)) from error
    host = _find_own_host(redis)
    listened, _, port = listening.rpartition(":")
    if is_loopback(listened) and not is_loopback(host):
        raise CannotServe(
            f"--advertise auto found {host}, where the worker does not listen: it listens on "
            f"{listened}; give --listen 0.0.0.0:{port}"
        )
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _find_own_host(redis: RedisAddress) -> str:
    """Return this machine's address on the way to the first server of a Redis that has a route.

    A connected UDP socket has the address that the routing table chooses; nothing is sent.
    """
    if not redis.hosts:
        raise CannotServe(_NEEDS_REDIS)
    failures = []
    for host, port in redis.hosts:
        try:
            resolved = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        except OSError as error:
            failures.append(f"{host}: {error.strerror}")
            continue
        for family, kind, _, _, address in resolved:
            try:
                return _connect(family, kind, address)
            except OSError as error:
                failures.append(f"{address[0]}: {error.strerror}")
    raise CannotServe(f"--advertise auto finds no way to Redis ({'; '.join(failures)})")


def _connect(family: int, kind: int, address: tuple[Any, ...]) -> str:
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        own: str = probe.getsockname()[0]
        return own
