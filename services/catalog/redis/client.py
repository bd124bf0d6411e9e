"""One Redis, be it a single server, a primary behind sentinels or a cluster: calls that are tried again.

A call is tried again after whatever may pass: a cut connection, a failover, a slot that moved. So whatever is asked
for must bear to be done twice; the scripts see to that.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode, PipelineCommand
from redis.exceptions import (
    AskError,
    AuthenticationError,
    ClusterDownError,
    ConnectionError,
    MaxConnectionsError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    TimeoutError,
    TryAgainError,
)

from kvrecall.domain.errors import CatalogError

T = TypeVar("T")
Argument = str | bytes | int | float
Command = tuple[Argument, ...]
Client = Redis | RedisCluster

_FIRST_PAUSE_SECONDS = 0.02
_LONGEST_PAUSE_SECONDS = 0.5
_FAILURES = (RedisError, RedisClusterException, OSError)
_PASSING = (
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
_PASSING_WORDS = ("READONLY", "NOREPLICAS", "UNBLOCKED", "MASTERDOWN")
"""Of replies that have no class of their own, or come out of a script."""


class HistoryChangedError(ConnectionError):
    """Another server answers, or the same one after a restart: it may not have what was written a moment ago."""


class CatalogRedis:
    """Commands to the server that has a key, tried again for up to `patience_seconds`.

    `timeout_seconds` is the longest that a replica may take to confirm a write. All methods raise CatalogError.
    """

    def __init__(self, client: Client, timeout_seconds: float, patience_seconds: float) -> None:
        self._client = client
        self._timeout_seconds = timeout_seconds
        self._patience_seconds = patience_seconds

    async def ask(self, key: str, *command: Argument) -> Any:
        """The reply to a command that is run where `key` is."""

        async def asked() -> Any:
            return (await _exchange(await self._server_of(key), [command]))[0]

        return await self._retried(asked)

    async def ask_each(self, commands: Sequence[tuple[str, Command]]) -> list[Any]:
        """The replies to commands, each run where its key is, in the order of `commands`."""
        return await self._retried(lambda: self._spread(commands)) if commands else []

    async def write(self, key: str, *command: Argument) -> Any:
        """As `ask`, for a change: where the server has replicas it returns once one of them has it."""

        async def written() -> Any:
            return await self._replicated(await self._server_of(key), command)

        return await self._retried(written)

    async def close(self) -> None:
        """Close all connections."""
        with suppress(*_FAILURES):
            await self._client.aclose()

    async def _replicated(self, server: Redis | ClusterNode, command: Command) -> Any:
        info, reply = await _exchange(server, [("INFO", "replication"), command])
        if not any(
            isinstance(value, dict) and value.get("state") == "online" for value in info.values()
        ):
            return reply
        # WAIT waits for what the server had written when this connection's last command, INFO, ran.
        wait: Command = ("WAIT", 1, int(1000 * self._timeout_seconds))
        after, copies = await _exchange(server, [("INFO", "replication"), wait])
        if after["master_replid"] != info["master_replid"]:
            raise HistoryChangedError("the primary changed during a write")
        if not copies:
            raise TimeoutError(f"no replica confirmed a write within {self._timeout_seconds} s")
        return reply

    async def _spread(self, commands: Sequence[tuple[str, Command]]) -> list[Any]:
        servers = [await self._server_of(key) for key, _ in commands]
        replies: list[Any] = [None] * len(commands)

        async def ask(server: Redis | ClusterNode) -> None:
            mine = [place for place, owner in enumerate(servers) if owner is server]
            for place, reply in zip(
                mine, await _exchange(server, [commands[n][1] for n in mine]), strict=True
            ):
                replies[place] = reply

        asked = map(ask, {id(server): server for server in servers}.values())
        for failure in await asyncio.gather(*asked, return_exceptions=True):
            if failure is not None:
                raise failure
        return replies

    async def _server_of(self, key: str) -> Redis | ClusterNode:
        if isinstance(self._client, Redis):
            return self._client
        await self._client.initialize()
        node = self._client.get_node_from_key(key)
        if node is None:
            raise RedisClusterException(f"no server has the slot of {key}")
        return node

    async def _retried(self, operation: Callable[[], Awaitable[T]]) -> T:
        clock = asyncio.get_running_loop().time
        last = clock() + self._patience_seconds
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                return await _cancellable(operation)
            except _FAILURES as error:
                if not _may_pass(error) or clock() + pause > last:
                    raise CatalogError(f"the catalog's Redis failed: {error}") from error
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            await self._look_again()

    async def _look_again(self) -> None:
        """Whoever does not answer may have been replaced: look where the servers are now."""
        with suppress(*_FAILURES):
            if isinstance(self._client, RedisCluster):
                await self._client.nodes_manager.initialize()
            else:
                # Not the connections in use: others are reading from them.
                await self._client.connection_pool.disconnect(inuse_connections=False)


async def _cancellable(operation: Callable[[], Awaitable[T]]) -> T:
    """Run it so that a cancellation is not lost: asyncio.wait_for, in the client, drops one before Python 3.12."""
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    result = await operation()
    if task is not None and task.cancelling() > before:
        raise asyncio.CancelledError
    return result


def _may_pass(error: Exception) -> bool:
    passing = isinstance(error, _PASSING) or any(word in str(error) for word in _PASSING_WORDS)
    return passing and not isinstance(error, AuthenticationError)


async def _exchange(server: Redis | ClusterNode, commands: Sequence[Command]) -> list[Any]:
    """Commands in one round trip, in order, on one connection. Raises the first error among the replies."""
    if isinstance(server, ClusterNode):
        sent = [PipelineCommand(place, *command) for place, command in enumerate(commands)]
        await server.execute_pipeline(sent)
        replies = [each.result for each in sent]
    else:
        async with server.pipeline(transaction=False) as pipeline:
            for command in commands:
                pipeline.execute_command(*command)
            replies = await pipeline.execute(raise_on_error=False)
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    return replies
