"""Commands to Redis with retries: one server, a primary behind sentinels, or a cluster.

A command is retried after every failure that may pass: a cut connection, a failover, a slot that
moved. So each command must be safe to run twice; the scripts see to that.

The identity of a catalog, its id and version, is required where its commands run. A server may come
back empty under a running process: after a failover to an empty replica, a restart without its log,
a FLUSHALL. Its keys then say of every session that there is none. So on one server, or a primary
behind sentinels, whatever may change something checks the identity in the script that changes it,
and plain reads are followed by a read of the identity on the same connection. In a cluster the
identity lies on one server: it is read before a change, and beside reads. A cluster that loses
another server's part is not noticed here.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeVar

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode, PipelineCommand
from redis.exceptions import (
    AskError,
    AuthenticationError,
    ClusterDownError,
    ConnectionError,
    MaxConnectionsError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    TimeoutError,
    TryAgainError,
)

from kvrecall.domain.errors import (
    CatalogError,
    CatalogReplaced,
    CatalogUnreachable,
    StorageFull,
)
from services.catalog.redis import scripts
from services.catalog.redis.connection.keys import Keys
from services.catalog.redis.connection.replication import Replication
from services.catalog.redis.connection.shared import Argument, Command, SharedConnection
from services.catalog.versions import build_catalog_replaced

T = TypeVar("T")
Client = Redis | RedisCluster

_FIRST_DELAY_SECONDS = 0.02
_LONGEST_DELAY_SECONDS = 0.5
# The number of commands of one exchange: parsing their replies holds the event loop.
_COMMANDS_AT_ONCE = 1000
_FAILURES = (RedisError, RedisClusterException, OSError)
_TRANSIENT = (
    ConnectionError,
    TimeoutError,
    ReadOnlyError,
    ClusterDownError,
    TryAgainError,
    AskError,
    MaxConnectionsError,
    RedisClusterException,
    OSError,
)
# Transient replies that have no class of their own, or come from within a script.
_TRANSIENT_WORDS = (
    "LOADING",
    "READONLY",
    "NOREPLICAS",
    "UNBLOCKED",
    "MASTERDOWN",
    "WAIT cannot be used with replica instances",
)
_REFUSED = "CATALOGREPLACED"
_HISTORY: Command = ("INFO", "replication")
# Between two looks at what replicas have confirmed; they do so at least once a second.
_CONFIRMATION_SECONDS = 0.05
# Commands that change nothing: they are sent as they are.
_READS = frozenset(
    {"EXISTS", "GET", "HGET", "HGETALL", "HKEYS", "HMGET", "HRANDFIELD", "LLEN", "LRANGE", "MGET"}
    | {"SRANDMEMBER", "STRLEN", "TIME", "ZCARD", "ZMSCORE", "ZRANGE", "ZRANDMEMBER"}
    | {"ZRANGEBYSCORE", "ZREVRANGEBYSCORE", "ZSCORE"}
)


@dataclass(frozen=True)
class RedisIdentity:
    """The id and the version that a catalog was opened with."""

    keys: Keys
    id: str
    version: str

    def build_reads(self, at_once: bool) -> list[tuple[str, Command]]:
        """Build the commands that read the identity, each after the key to route it by.

        `at_once`: in one command, of a server that has both keys.
        """
        names = (self.keys.id, self.keys.version)
        if at_once:
            return [(names[0], ("MGET", *names))]
        return [(name, ("GET", name)) for name in names]

    def require(self, replies: Sequence[Any]) -> None:
        """Check the replies to the reads. Raises CatalogReplaced."""
        values = replies[0] if isinstance(replies[0], list) else replies
        found = [(value or b"-").decode() for value in values]
        if found != [self.id, self.version]:
            raise self._build_error(*found)

    def guard(self, command: Command) -> Command:
        """Return a command that refuses to run in another catalog; reads stay as they are."""
        name, *words = command
        if name in _READS:
            return command
        if name == "EVAL":
            script, count, *rest = words
            assert isinstance(script, str)
            assert isinstance(count, int)
            keys, arguments = rest[:count], rest[count:]
        else:
            script, keys, arguments = scripts.RUN_COMMAND, [words[0]], list(command)
        keys = [*keys, self.keys.id, self.keys.version]
        return ("EVAL", _guard_script(script), len(keys), *keys, *arguments, self.id, self.version)

    def read_refusal(self, error: Exception) -> CatalogReplaced | None:
        """Return the error that a guarded command was refused with, if it was."""
        _, refused, found = str(error).partition(f"{_REFUSED} ")
        return self._build_error(*found.split()[:2]) if refused else None

    def _build_error(self, id: str, version: str) -> CatalogReplaced:
        location = f"the namespace {self.keys.namespace!r} in Redis"
        return build_catalog_replaced(location, self.id, _to_found(id, self.id, version))


@cache
def _guard_script(script: str) -> str:
    return f"{scripts.REQUIRE_IDENTITY}\n{script}"


def _to_found(id: str, expected: str, version: str) -> str:
    """Say what was found instead, for people."""
    if id == "-":
        return "is empty, or has lost its id"
    return f"has version {version} now" if id == expected else f"holds another catalog, {id}"


class HistoryChangedError(ConnectionError):
    """Another server answers, or the same one after a restart: it may lack the latest writes."""


class CatalogRedis:
    """Commands to the server that has a key, retried for up to `patience_seconds`.

    `timeout_seconds` limits the wait for a replica to confirm a write. All methods raise
    CatalogError.
    """

    def __init__(self, client: Client, timeout_seconds: float, patience_seconds: float) -> None:
        self._client = client
        self._timeout_seconds = timeout_seconds
        self._patience_seconds = patience_seconds
        self._identity: RedisIdentity | None = None
        # By server, whether it had replicas at the last write.
        self._replicated: dict[str, bool] = {}
        self._wait: Command = ("WAIT", 1, int(1000 * timeout_seconds))
        # Reads of a cluster take connections of their nodes: a slow server delays no other's.
        self._shared = (
            SharedConnection(client.connection_pool, 2 * timeout_seconds)
            if isinstance(client, Redis)
            else None
        )

    def require(self, identity: RedisIdentity) -> None:
        """From now on run commands in the catalog of this identity only; others are refused.

        All methods raise CatalogReplaced then.
        """
        self._identity = identity

    async def read(self, key: str, *command: Argument) -> Any:
        """Run a command on the server that has `key` and return its reply."""
        (reply,) = await self.read_each([(key, command)])
        return reply

    async def read_each(self, commands: Sequence[tuple[str, Command]]) -> list[Any]:
        """Run commands, each on the server of its key; return the replies in order."""
        replies: list[Any] = []
        for first in range(0, len(commands), _COMMANDS_AT_ONCE):
            some = commands[first : first + _COMMANDS_AT_ONCE]
            replies += await self._retry(partial(self._run_identified, some))
        return replies

    async def read_values(self, keys: Sequence[str]) -> list[bytes | None]:
        """Read the values of keys, None for one that is not there: by one command where one server has them all."""
        if not isinstance(self._client, Redis):
            return await self.read_each([(key, ("GET", key)) for key in keys])
        found = list[bytes | None]()
        for first in range(0, len(keys), _COMMANDS_AT_ONCE):
            some = keys[first : first + _COMMANDS_AT_ONCE]
            found += await self.read(some[0], "MGET", *some)
        return found

    async def write(self, key: str, *command: Argument) -> Any:
        """Run a command that changes something.

        If the server has replicas, this returns once one of them has the change.
        """

        async def run() -> Any:
            guarded = await self._guard(command)
            return await self._run_replicated(key, await self._get_server(key), guarded)

        return await self._retry(run)

    async def get_eviction_policies(self) -> set[str]:
        """Return the `maxmemory-policy` of each primary."""
        return {info.get("maxmemory_policy", "") for info in await self._read_memory()}

    async def has_room(self) -> bool:
        """Return whether each primary has memory left: one without refuses all but deletions."""
        memory = await self._read_memory()
        limits = [(int(info["used_memory"]), int(info.get("maxmemory", 0))) for info in memory]
        return all(used < limit for used, limit in limits if limit)

    async def _read_memory(self) -> list[Mapping[str, Any]]:
        call: list[Command] = [("INFO", "memory")]
        servers = await self._retry(self._get_servers)
        replies = [await self._retry(partial(_exchange, server, call)) for server in servers]
        return [info for (info,) in replies]

    async def close(self) -> None:
        """Close all connections."""
        if self._shared is not None:
            self._shared.close()
        with suppress(*_FAILURES):
            await self._client.aclose()

    async def _run_replicated(self, key: str, server: Redis | ClusterNode, command: Command) -> Any:
        name = server.name if isinstance(server, ClusterNode) else ""
        try:
            if name not in self._replicated:
                (info,) = await self._run_alone(server, [_HISTORY])
                self._replicated[name] = Replication.read(info).has_replicas
            return await self._run_known(name, key, server, command)
        except _FAILURES:
            # Another server may be the primary now: connections that are idle may lead to this one.
            self._replicated.pop(name, None)
            if isinstance(server, Redis):
                await server.connection_pool.disconnect(inuse_connections=False)
            raise

    async def _run_known(
        self, name: str, key: str, server: Redis | ClusterNode, command: Command
    ) -> Any:
        """Run a write to a server of which it is known whether it has replicas."""
        if not self._replicated[name]:
            info, reply = await self._run_alone(server, [_HISTORY, command])
            found = Replication.read(info)
            self._replicated[name] = found.has_replicas
            if found.has_replicas:
                await self._await_copy(key, server, found.history)
            return reply
        # In one batch: WAIT of Valkey and of Redis 8 waits for the writes of its own connection alone.
        reply, info, _, after = await _exchange(server, [command, _HISTORY, self._wait, _HISTORY])
        written = Replication.read(info)
        self._replicated[name] = written.has_replicas
        if written.has_replicas and not Replication.read(after).has_copy(written):
            await self._await_copy(key, server, written.history)
        return reply

    async def _await_copy(self, key: str, server: Redis | ClusterNode, history: str) -> None:
        """Wait until a replica has all that the server has now.

        Also for a repeated write that changes nothing: of it no such WAIT knows, so a fence is written,
        and what replicas have confirmed is compared. Raises HistoryChangedError and TimeoutError.
        """
        # Without a fence replicas confirm once a second. While a catalog is opened there is no namespace.
        fence = [_build_fence(self._identity.keys.namespace, key)] if self._identity else []
        clock = asyncio.get_running_loop().time
        last = clock() + self._timeout_seconds
        wanted: Replication | None = None
        while True:
            info, *_, after = await _exchange(server, [_HISTORY, *fence, self._wait, _HISTORY])
            wanted, found = wanted or Replication.read(info), Replication.read(after)
            if found.history != history:
                raise HistoryChangedError("the primary changed during a write")
            if found.has_copy(wanted):
                return
            if clock() > last:
                seconds = self._timeout_seconds
                raise TimeoutError(f"no replica confirmed a write within {seconds} s")
            await asyncio.sleep(_CONFIRMATION_SECONDS)

    async def _run_alone(
        self, server: Redis | ClusterNode, commands: Sequence[Command]
    ) -> list[Any]:
        """Run commands over the connection that all tasks share, if there is one."""
        shared = self._shared
        return await (_exchange(server, commands) if shared is None else shared.run(commands))

    async def _guard(self, command: Command) -> Command:
        """Return a command that runs in this catalog only; in a cluster, look before it runs."""
        identity = self._identity
        if identity is None:
            return command
        if isinstance(self._client, Redis):
            return identity.guard(command)
        identity.require(await self._run_each(identity.build_reads(at_once=False)))
        return command

    async def _run_identified(self, commands: Sequence[tuple[str, Command]]) -> list[Any]:
        """Run commands, then read the catalog's identity, in a cluster beside them."""
        identity = self._identity
        if identity is None:
            return await self._run_each(commands)
        alone = isinstance(self._client, Redis)
        if alone:
            commands = [(key, identity.guard(command)) for key, command in commands]
        replies = await self._run_each([*commands, *identity.build_reads(at_once=alone)])
        identity.require(replies[len(commands) :])
        return replies[: len(commands)]

    async def _run_each(self, commands: Sequence[tuple[str, Command]]) -> list[Any]:
        if self._shared is not None:
            return await self._shared.run([command for _, command in commands])
        servers = [await self._get_server(key) for key, _ in commands]
        replies: list[Any] = [None] * len(commands)

        async def run(server: Redis | ClusterNode) -> None:
            indices = [index for index, owner in enumerate(servers) if owner is server]
            some = await _exchange(server, [commands[index][1] for index in indices])
            for index, reply in zip(indices, some, strict=True):
                replies[index] = reply

        runs = map(run, {id(server): server for server in servers}.values())
        for failure in await asyncio.gather(*runs, return_exceptions=True):
            if failure is not None:
                raise failure
        return replies

    async def _get_servers(self) -> list[Redis | ClusterNode]:
        if isinstance(self._client, Redis):
            return [self._client]
        await self._client.initialize()
        return list(self._client.get_primaries())

    async def _get_server(self, key: str) -> Redis | ClusterNode:
        if isinstance(self._client, Redis):
            return self._client
        await self._client.initialize()
        node = self._client.get_node_from_key(key)
        if node is None:
            raise RedisClusterException(f"no server has the slot of {key}")
        return node

    async def _retry(self, operation: Callable[[], Awaitable[T]]) -> T:
        clock = asyncio.get_running_loop().time
        last = clock() + self._patience_seconds
        delay = _FIRST_DELAY_SECONDS
        while True:
            try:
                return await _run_cancellable(operation)
            except _FAILURES as error:
                if self._identity and (refusal := self._identity.read_refusal(error)):
                    raise refusal from error
                if not _is_transient(error) or clock() + delay > last:
                    raise _build_failure(error) from error
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))
            delay = min(2 * delay, _LONGEST_DELAY_SECONDS)
            await self._rediscover()

    async def _rediscover(self) -> None:
        """Find the servers again: one that fails may have been replaced."""
        with suppress(*_FAILURES):
            if isinstance(self._client, RedisCluster):
                await self._client.nodes_manager.initialize()
            else:
                # Not the connections in use: others are reading from them.
                await self._client.connection_pool.disconnect(inuse_connections=False)


async def _run_cancellable(operation: Callable[[], Awaitable[T]]) -> T:
    """Run an operation so that a cancellation is not lost.

    asyncio.wait_for, which the client uses, drops a cancellation before Python 3.12.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    result = await operation()
    if task is not None and task.cancelling() > before:
        raise asyncio.CancelledError
    return result


def _is_transient(error: Exception) -> bool:
    transient = isinstance(error, _TRANSIENT) or any(
        word in str(error) for word in _TRANSIENT_WORDS
    )
    return transient and not isinstance(error, AuthenticationError)


async def _exchange(server: Redis | ClusterNode, commands: Sequence[Command]) -> list[Any]:
    """Run commands in one round trip, in order, on one connection.

    Raises the first error among the replies.
    """
    if isinstance(server, ClusterNode):
        sent = [PipelineCommand(index, *command) for index, command in enumerate(commands)]
        await server.execute_pipeline(sent)
        replies = [each.result for each in sent]
    elif len(commands) == 1:
        return [await server.execute_command(*commands[0])]  # cheaper than a pipeline of one
    else:
        async with server.pipeline(transaction=False) as pipeline:
            for command in commands:
                pipeline.execute_command(*command)
            replies = await pipeline.execute(raise_on_error=False)
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    return replies


def _build_fence(namespace: str, key: str) -> Command:
    """Build a write to the slot of `key` that leaves nothing, so that WAIT waits for all before it."""
    head, opened, rest = key.partition("{")
    tag, closed, _ = rest.partition("}")
    name = f"{head}{{{tag}}}:fence" if opened and closed and tag else f"{namespace}:fence:{{{key}}}"
    return ("EVAL", scripts.WRITE_FENCE, 1, name)


def _build_failure(error: Exception) -> CatalogError:
    if isinstance(error, OutOfMemoryError) or "OOM command not allowed" in str(error):
        return StorageFull(
            "the catalog stores no more, as its Redis has used up its maxmemory: delete sessions, "
            "conversations or responses, or give it more"
        )
    kind = CatalogUnreachable if _is_transient(error) else CatalogError
    return kind(f"the catalog's Redis failed: {error}")
