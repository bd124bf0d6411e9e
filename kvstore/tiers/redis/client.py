"""One Redis, be it a single server, a primary that sentinels name, or a cluster: calls that are tried again.

The client is redis-py's synchronous one: callers are threads that wait for the answer anyway, and pages of megabytes
would be handed to an event loop and back for nothing. The catalog, which lives in an event loop, uses asyncio's.
"""

import random
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_args
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from redis import Redis, RedisCluster
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode
from redis.exceptions import (
    AskError,
    AuthenticationError,
    ClusterDownError,
    ConnectionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    TimeoutError,
    TryAgainError,
)
from redis.retry import Retry
from redis.sentinel import Sentinel

from kvstore.errors import (
    KvStoreError,
    StaleWriterError,
    TierFailedError,
    TierFullError,
    TierSettingsError,
)
from kvstore.tiers.redis.zero_copy import Command, batched

T = TypeVar("T")
_Scheme = Literal[
    "redis",
    "rediss",
    "unix",
    "redis+sentinel",
    "rediss+sentinel",
    "redis+cluster",
    "rediss+cluster",
]

_ATTEMPTS = 4
_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 0.5
_REST_SECONDS = 1.0
"""So long after a call that came to nothing others fail at once: each write of a queue must not wait in its turn."""

_ONLINE_REPLICA = re.compile(rb"^slave\d+:.*\bstate=online\b", re.MULTILINE)
_HISTORY = re.compile(rb"^master_replid:\w+", re.MULTILINE)
_READ_BYTES = 1 << 18
_FAILURES = (RedisError, RedisClusterException, OSError)
_PASSING = (
    ConnectionError,
    TimeoutError,
    ReadOnlyError,
    ClusterDownError,
    TryAgainError,
    AskError,
    RedisClusterException,
    OSError,
)
"""What may be gone at the next attempt: restarts, failovers, slots that move."""


class HistoryChangedError(ConnectionError):
    """Another server answers, or the same one after a restart: it may not have what was written a moment ago."""


@dataclass(frozen=True)
class RedisAddress:
    """What a URL says. Its text names the server and never a password."""

    scheme: _Scheme
    hosts: tuple[tuple[str, int], ...]
    path: str
    username: str | None = field(repr=False)
    password: str | None = field(repr=False)
    sentinel_password: str | None = field(repr=False)
    url: str = field(repr=False)

    def __str__(self) -> str:
        return (
            f"{self.scheme}://{','.join(f'{host}:{port}' for host, port in self.hosts)}{self.path}"
        )


@dataclass(frozen=True)
class _Topology:
    """Which server has a key, and what to do when it turned out to be the wrong one."""

    client_of: Callable[[str], Redis]
    refresh: Callable[[], None]
    close: Callable[[], None]


def parse_address(url: str) -> RedisAddress:
    """`redis[s]://[user:password@]host[:port][/database]`, `unix://path`, `redis[s]+sentinel://host:port,.../service`
    with `?sentinel_password=` where the sentinels want one, or `redis[s]+cluster://host:port,...`.

    Raises TierSettingsError, which never repeats the URL: it may hold a password.
    """
    try:
        address = _address(url, urlsplit(url))
    except ValueError:
        address = None
    if address is None:
        raise TierSettingsError(
            f"this Redis URL cannot be read: expected {', '.join(get_args(_Scheme))} followed by ://, host:port "
            "(several with commas) and, for sentinels, /service; percent-encode what is special in a user or password"
        )
    return address


def _address(url: str, parts: SplitResult) -> RedisAddress | None:
    scheme = next((known for known in get_args(_Scheme) if known == parts.scheme), None)
    userinfo, _, hosts = parts.netloc.rpartition("@")
    needs_service = parts.scheme.endswith("+sentinel")
    # What is not percent-encoded in a password may end up in any later part.
    if "@" in parts.path + parts.query or "#" in url:
        return None
    if (
        scheme is None
        or (needs_service and not parts.path.strip("/"))
        or (scheme != "unix" and not hosts)
    ):
        return None
    username, _, password = userinfo.partition(":")
    port = 26379 if needs_service else 6379
    return RedisAddress(
        scheme=scheme,
        hosts=tuple(_host(host, port) for host in hosts.split(",") if host),
        path=parts.path,
        username=unquote(username) or None,
        password=unquote(password) or None,
        sentinel_password=parse_qs(parts.query).get("sentinel_password", [None])[0],
        url=url,
    )


def _host(text: str, default_port: int) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError("no host")
    return parts.hostname, parts.port or default_port


class RedisServer:
    """Runs operations on the server that has a key. Safe to call from several threads.

    Every call ends within about `timeout_seconds` per attempt. Raises TierFullError when Redis has no memory left,
    StaleWriterError when a script refused with `STALE`, and TierFailedError for everything else that fails, also when
    it cannot be reached at the start.
    """

    def __init__(self, address: RedisAddress, timeout_seconds: float) -> None:
        self._address = address
        self._failed_at = float("-inf")
        self._failure: str | None = None
        self._topology: _Topology | None = None
        self._timeout_seconds = timeout_seconds

    def __str__(self) -> str:
        return str(self._address)

    def run(self, key: str, operation: Callable[[Redis], T]) -> T:
        """The operation's result on the server that has `key`; it may run several times, so it must bear that."""
        return self._attempt(lambda topology: operation(topology.client_of(key)))

    def pipelined(self, keys: Sequence[str], command_of: Callable[[str], Command]) -> list[Any]:
        """One command for each key, all at once, each to the server that has the key: replies in order of `keys`."""
        return self._attempt(lambda topology: _spread(topology, keys, command_of)) if keys else []

    def close(self) -> None:
        """Close all connections."""
        if self._topology is not None:
            self._topology.close()

    def _attempt(self, operation: Callable[[_Topology], T]) -> T:
        if self._failure is not None and time.monotonic() - self._failed_at < _REST_SECONDS:
            raise TierFailedError(self._failure)
        for attempt in range(_ATTEMPTS):
            try:
                if self._topology is None:
                    self._topology = _connected(self._address, self._timeout_seconds)
                result = operation(self._topology)
            except _FAILURES as error:
                passing = _may_pass(error)
                if attempt + 1 < _ATTEMPTS and passing:
                    self._pause(attempt)
                    continue
                raise self._given_up(error, passing) from error
            self._failure = None
            return result
        raise AssertionError("the last attempt returns or raises")

    def _pause(self, attempt: int) -> None:
        # The whole pause is chance: clients that lost the same server must not come back at the same moment.
        time.sleep(
            random.uniform(0, min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2**attempt))
        )
        if self._topology is not None:
            with suppress(*_FAILURES):
                self._topology.refresh()

    def _given_up(self, error: Exception, passing: bool) -> KvStoreError:
        if isinstance(error, OutOfMemoryError) or "OOM command not allowed" in str(error):
            return TierFullError(
                f"{self} has no memory left for pages; raise its limit (maxmemory) or drop sessions"
            )
        if str(error).startswith("STALE"):
            return StaleWriterError(f"{self} refused {str(error).removeprefix('STALE ')}")
        said = f"{self} failed: {error}"
        if passing:
            self._failure = said
            self._failed_at = time.monotonic()
        return TierFailedError(said)


def _may_pass(error: Exception) -> bool:
    # A script says in its own words that a primary has become a replica.
    return (isinstance(error, _PASSING) or "-READONLY" in str(error)) and not isinstance(
        error, AuthenticationError
    )


def replicated(client: Redis, commands: Sequence[Command], timeout_seconds: float) -> list[Any]:
    """As `batched`, and where the server has replicas, return only once one of them has what was written.

    Raises HistoryChangedError when another primary took over in between: it may lack the writes. Raises TimeoutError
    when no replica answers in time.
    """
    info, *replies = batched(client, [("INFO", "replication"), *commands])
    if not _ONLINE_REPLICA.search(info):
        return replies
    # WAIT waits for what the server had written when this connection's last command, INFO, ran.
    after, copies = batched(
        client, [("INFO", "replication"), ("WAIT", 1, int(timeout_seconds * 1000))]
    )
    if _HISTORY.findall(after) != _HISTORY.findall(info):
        raise HistoryChangedError("the primary changed during a write")
    if not copies:
        raise TimeoutError(f"no replica confirmed a write within {timeout_seconds} s")
    return replies


def _spread(
    topology: _Topology, keys: Sequence[str], command_of: Callable[[str], Command]
) -> list[Any]:
    clients = [topology.client_of(key) for key in keys]
    replies = dict[str, Any]()
    for client in {id(client): client for client in clients}.values():
        mine = [key for key, owner in zip(keys, clients, strict=True) if owner is client]
        replies |= zip(mine, batched(client, map(command_of, mine)), strict=True)
    return [replies[key] for key in keys]


def _connected(address: RedisAddress, timeout_seconds: float) -> _Topology:
    """Connections with no retries of their own: there is one place that tries again."""
    common: dict[str, Any] = {
        "socket_timeout": 2 * timeout_seconds,  # WAIT alone may take one
        "socket_connect_timeout": timeout_seconds,
        "socket_read_size": _READ_BYTES,
        "protocol": 2,
        "retry": Retry(NoBackoff(), 0),
    }
    if "+" not in address.scheme:
        client = Redis.from_url(address.url, **common)
        return _Topology(lambda _: client, lambda: None, client.close)
    common |= {"username": address.username, "password": address.password}
    if address.scheme.startswith("rediss"):
        common["ssl"] = True
    if address.scheme.endswith("+sentinel"):
        return _behind_sentinels(address, common)
    nodes = [ClusterNode(host, port) for host, port in address.hosts]
    cluster = RedisCluster(startup_nodes=nodes, **common)
    return _Topology(
        client_of=lambda key: cluster.get_redis_connection(cluster.get_node_from_key(key)),
        refresh=lambda: cluster.nodes_manager.initialize(),
        close=lambda: cluster.close(),
    )


def _behind_sentinels(address: RedisAddress, common: dict[str, Any]) -> _Topology:
    own = {"username": None, "password": address.sentinel_password}
    sentinel = Sentinel(list(address.hosts), sentinel_kwargs=common | own, **common)
    client = sentinel.master_for(address.path.strip("/"))

    def close() -> None:
        client.close()
        for one in sentinel.sentinels:
            one.close()

    # Whoever does not answer may have been replaced: the next connection asks the sentinels again.
    # Not those in use: other threads are reading from them.
    return _Topology(
        lambda _: client, lambda: client.connection_pool.disconnect(inuse_connections=False), close
    )
