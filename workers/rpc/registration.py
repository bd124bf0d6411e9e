"""A worker announces itself where gateways look for workers: a record in Redis that lasts for seconds."""

import asyncio
from collections.abc import Callable
from typing import Any

import structlog
from redis.exceptions import RedisClusterException, RedisError

from kvrecall.protocol.v1 import WORKER_RECORD_SECONDS, worker_key, workers_key
from kvrecall.protocol.v1 import worker_pb2 as wire

_RENEWALS_PER_RECORD = 3


class Registration:
    """Renews a worker's record until it stops. `record` makes it, as a drain has begun or not.

    A registry that cannot be reached is tried again: the worker goes on meanwhile.
    """

    def __init__(
        self, client: Any, namespace: str, name: str, record: Callable[[bool], wire.WorkerRecord]
    ) -> None:
        self._client = client
        self._name = name
        self._names_key = workers_key(namespace)
        self._key = worker_key(namespace, name)
        self._record = record
        self._draining = self._stopped = False
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Announce the worker, and go on doing so."""
        await self._announce()
        self._task = asyncio.create_task(self._renew(), name="registration")

    async def drain(self) -> None:
        """Say that the worker takes no session any more."""
        self._draining = True
        await self._announce()

    async def stop(self) -> None:
        """Take the record away, and close the connection."""
        self._stopped = True  # the client may lose a cancellation: then this ends the renewals
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        await self._told(self._forget())
        await self._client.aclose()

    async def _renew(self) -> None:
        while not self._stopped:
            await asyncio.sleep(WORKER_RECORD_SECONDS / _RENEWALS_PER_RECORD)
            await self._announce()

    async def _announce(self) -> None:
        await self._told(self._write(self._record(self._draining)))

    async def _write(self, record: wire.WorkerRecord) -> None:
        # The record first: whoever finds a name without one takes the name away.
        await self._client.set(
            self._key, record.SerializeToString(), px=int(WORKER_RECORD_SECONDS * 1000)
        )
        await self._client.sadd(self._names_key, self._name)

    async def _forget(self) -> None:
        await self._client.delete(self._key)
        await self._client.srem(self._names_key, self._name)

    async def _told(self, call: Any) -> None:
        try:
            await call
        except (RedisError, RedisClusterException, OSError, TimeoutError) as error:
            structlog.get_logger(__name__).warning(
                "the registry cannot be reached", reason=str(error)
            )
