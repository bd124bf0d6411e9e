"""Synchronous client of one Redis (server, sentinels or cluster) with retries.

The client is redis-py's synchronous one: callers are threads that wait for the reply anyway, and
passing pages of megabytes through an event loop would only add work. The catalog, which runs in an
event loop, uses redis-py's asyncio client.
"""

import builtins
import random
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

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

from kvstore.errors import KvStoreError, TierFailedError, TierFullError
from kvstore.tiers.redis.address import RedisAddress
from kvstore.tiers.redis.zero_copy import Command, borrow, exchange, require, run_batch

T = TypeVar("T")

_ATTEMPTS = 4
_FIRST_DELAY_SECONDS = 0.05
_MAX_DELAY_SECONDS = 0.5
# No attempt begins later than this after the call. A timeout is never tried again: a server that
# is silent now costs its callers one timeout, then it rests until a probe succeeds.
_RETRY_SECONDS = 2.0

# Time for a reply beyond the time that the server itself may wait for a replica.
_REPLY_SECONDS = 0.5

_ONLINE_REPLICA = re.compile(rb"^slave\d+:.*\bstate=online\b", re.MULTILINE)
_SCAN_KEYS = 1000
_HISTORY = re.compile(rb"^master_replid:\w+", re.MULTILINE)
_READ_BYTES = 1 << 18
_FAILURES = (RedisError, RedisClusterException, OSError)
# Errors that may be gone at the next attempt: restarts, failovers, slots that move.
_TRANSIENT = (
    ConnectionError,
    TimeoutError,
    ReadOnlyError,
    ClusterDownError,
    TryAgainError,
    AskError,
    RedisClusterException,
    OSError,
)
# redis-py's own and the socket's.
_SILENCE = (TimeoutError, builtins.TimeoutError)


class HistoryChangedError(ConnectionError):
    """Another primary answers, or the same one after a restart; it may lack recent writes."""


@dataclass(frozen=True)
class _Topology:
    """Connections: the client of a key's server, those of all, a refresh, and the shutdown."""

    get_client: Callable[[str], Redis]
    get_all: Callable[[], list[Redis]]
    refresh: Callable[[], None]
    close: Callable[[], None]


class RedisServer:
    """Runs operations on the servers that have keys. Safe to call from several threads.

    A call takes a few seconds at most, one timeout when a server is silent. After a failure every
    call fails at once, until `probe` finds that the servers answer again: pages of any session are on
    all of them. Operations are repeated after transient errors. Raises TierFullError when Redis is out
    of memory, and TierFailedError for every other failure, a refused first connection included.
    """

    def __init__(self, address: RedisAddress, timeout_seconds: float) -> None:
        self._address = address
        self._failure: str | None = None
        self._topology: _Topology | None = None
        self._timeout_seconds = timeout_seconds
        self.repeated_calls = 0
        """Calls that were sent again: the first time may have had its effect without a reply."""

    def __str__(self) -> str:
        return str(self._address)

    def run_per_server(
        self, keys: Sequence[str], operation: Callable[[Redis, list[str]], list[T]]
    ) -> list[T]:
        """Run an operation on each server with those of the keys that it has.

        It returns one result per key; returned are all results in order of `keys`.
        """
        return self._run_with_retries(lambda topology: _run_per_key(topology, keys, operation))

    def run_pipelined(
        self, keys: Sequence[str], build_command: Callable[[str], Command]
    ) -> list[Any]:
        """Run one command per key, pipelined per server; return the replies in order of `keys`."""
        return self.run_per_server(
            keys, lambda client, own_keys: run_batch(client, map(build_command, own_keys))
        )

    def run_on_all(self, operation: Callable[[Redis], T]) -> list[T]:
        """Run an operation on every server: the one, or each primary of a cluster."""
        return self._run_with_retries(
            lambda topology: [operation(client) for client in topology.get_all()]
        )

    @property
    def failure(self) -> str | None:
        """Message of the failure after which calls fail at once; None while the server answers."""
        return self._failure

    def probe(self) -> bool:
        """Return whether a server that failed answers again; if so, calls reach it again."""
        try:
            topology = self._get_topology()
            topology.refresh()
            for client in topology.get_all():
                client.ping()
        except _FAILURES:
            return False
        self._failure = None
        return True

    def close(self) -> None:
        """Close all connections."""
        if self._topology is not None:
            self._topology.close()

    def _run_with_retries(self, operation: Callable[[_Topology], T]) -> T:
        if self._failure is not None:
            raise TierFailedError(self._failure)
        last_start = time.monotonic() + _RETRY_SECONDS
        for attempt in range(_ATTEMPTS):
            try:
                return operation(self._get_topology())
            except _FAILURES as error:
                is_transient = _is_transient(error)
                may_retry = attempt + 1 < _ATTEMPTS and time.monotonic() < last_start
                if may_retry and is_transient and not isinstance(error, _SILENCE):
                    self.repeated_calls += 1
                    self._back_off(attempt)
                    continue
                raise self._to_store_error(error, is_transient) from error
        raise AssertionError("the last attempt returns or raises")

    def _get_topology(self) -> _Topology:
        if self._topology is None:
            self._topology = _connect(self._address, self._timeout_seconds)
        return self._topology

    def _back_off(self, attempt: int) -> None:
        # Full jitter: clients that lost the same server must not come back at the same moment.
        delay = min(_MAX_DELAY_SECONDS, _FIRST_DELAY_SECONDS * 2**attempt)
        time.sleep(random.uniform(0, delay))
        if self._topology is not None:
            with suppress(*_FAILURES):
                self._topology.refresh()

    def _to_store_error(self, error: Exception, is_transient: bool) -> KvStoreError:
        if isinstance(error, OutOfMemoryError):
            return TierFullError(
                f"{self} has no memory left for pages; raise its limit (maxmemory) or delete "
                "sessions"
            )
        message = f"{self} failed: {error}"
        if is_transient:
            self._failure = message
        return TierFailedError(message)


def run_replicated(client: Redis, commands: Sequence[Command], timeout_seconds: float) -> list[Any]:
    """Run writes as `run_batch`; if the server has replicas, wait until one has the writes.

    Raises HistoryChangedError when another primary took over in between, which may lack the
    writes, and TimeoutError when no replica confirms them in time.
    """
    wait = ("WAIT", 1, int(timeout_seconds * 1000))
    # On one connection: Valkey's WAIT looks at the writes of its own connection alone.
    with borrow(client) as connection:
        written = exchange(connection, [("INFO", "replication"), *commands])
        sound = not any(isinstance(reply, Exception) for reply in written)
        has_replica = sound and _ONLINE_REPLICA.search(written[0])
        waited = exchange(connection, [("INFO", "replication"), wait]) if has_replica else []
    info, *replies = require(written)
    if not waited:
        return replies
    info_after, confirmed = require(waited)
    if _HISTORY.findall(info_after) != _HISTORY.findall(info):
        raise HistoryChangedError("the primary changed during a write")
    if not confirmed:
        raise TimeoutError(f"no replica confirmed a write within {timeout_seconds} s")
    return replies


def scan_names(client: Redis, pattern: str) -> list[str]:
    """List the keys of one server that match a pattern, each once; it visits all keys in steps.

    Keys that are written or expire meanwhile may be among them or not.
    """
    names = set[bytes]()
    cursor: Any = 0
    while True:
        ((cursor, found),) = run_batch(
            client, [("SCAN", cursor, "MATCH", pattern, "COUNT", _SCAN_KEYS)]
        )
        names.update(found)
        if not int(cursor):
            return [name.decode() for name in names]


def _is_transient(error: Exception) -> bool:
    return isinstance(error, _TRANSIENT) and not isinstance(error, AuthenticationError)


def _run_per_key(
    topology: _Topology,
    keys: Sequence[str],
    operation: Callable[[Redis, list[str]], list[T]],
) -> list[T]:
    clients = [topology.get_client(key) for key in keys]
    results = dict[str, T]()
    for client in {id(client): client for client in clients}.values():
        own_keys = [key for key, owner in zip(keys, clients, strict=True) if owner is client]
        results |= zip(own_keys, operation(client, own_keys), strict=True)
    return [results[key] for key in keys]


def _connect(address: RedisAddress, timeout_seconds: float) -> _Topology:
    """Create connections without retries of their own: only RedisServer retries."""
    common: dict[str, Any] = {
        "socket_timeout": timeout_seconds + _REPLY_SECONDS,  # WAIT alone may take one timeout.
        "socket_connect_timeout": timeout_seconds,
        "socket_read_size": _READ_BYTES,
        "protocol": 2,
        "retry": Retry(NoBackoff(), 0),
    }
    if "+" not in address.scheme:
        client = Redis.from_url(address.url, **common)
        return _Topology(lambda _: client, lambda: [client], lambda: None, client.close)
    common |= {"username": address.username, "password": address.password}
    if address.scheme.startswith("rediss"):
        common["ssl"] = True
    if address.scheme.endswith("+sentinel"):
        return _connect_sentinels(address, common)
    nodes = [ClusterNode(host, port) for host, port in address.hosts]
    cluster = RedisCluster(startup_nodes=nodes, **common)
    return _Topology(
        get_client=lambda key: cluster.get_redis_connection(cluster.get_node_from_key(key)),
        get_all=lambda: [cluster.get_redis_connection(node) for node in cluster.get_primaries()],
        refresh=lambda: cluster.nodes_manager.initialize(),
        close=lambda: cluster.close(),
    )


def _connect_sentinels(address: RedisAddress, common: dict[str, Any]) -> _Topology:
    credentials = {"username": None, "password": address.sentinel_password}
    sentinel = Sentinel(list(address.hosts), sentinel_kwargs=common | credentials, **common)
    client = sentinel.master_for(address.path.strip("/"))

    def refresh() -> None:
        # The primary may have been replaced: new connections ask the sentinels again. Connections
        # in use stay, because other threads read from them.
        client.connection_pool.disconnect(inuse_connections=False)

    def close() -> None:
        client.close()
        for each in sentinel.sentinels:
            each.close()

    return _Topology(lambda _: client, lambda: [client], refresh, close)
