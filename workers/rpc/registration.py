"""Registration of a worker for gateways: a record in Redis that expires unless it is renewed."""

import asyncio
from collections.abc import Callable
from typing import Any

import structlog
from redis.exceptions import RedisClusterException, RedisError

from kvrecall.protocol.v1 import WORKER_RECORD_SECONDS, worker_key, workers_key
from kvrecall.protocol.v1 import worker_pb2 as pb
from kvrecall.telemetry.outage import Outage

_RENEWALS_PER_RECORD = 3

_log = structlog.get_logger(__name__)


class Registration:
    """Renews a worker's record until it stops. `record` builds it; its argument: the worker drains.

    An unreachable registry is tried again, after a call of `on_failure`; the worker runs on.
    """

    def __init__(
        self,
        client: Any,
        namespace: str,
        name: str,
        record: Callable[[bool], pb.WorkerRecord],
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self._client = client
        self._name = name
        self._names_key = workers_key(namespace)
        self._key = worker_key(namespace, name)
        self._record = record
        self._on_failure = on_failure
        self._outage = Outage(_log, "registry unreachable", "registry reachable again")
        self._draining = False
        self._stopped = False
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Register the worker, and renew its record from now on."""
        await self._register()
        self._task = asyncio.create_task(self._renew(), name="registration")

    async def drain(self) -> None:
        """Mark the record: the worker accepts no session any more."""
        self._draining = True
        await self._register()

    async def stop(self) -> None:
        """Delete the record, and close the connection."""
        # The client may swallow a cancellation: then this ends the renewals.
        self._stopped = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        await self._log_errors(self._unregister())
        await self._client.aclose()

    async def _renew(self) -> None:
        while not self._stopped:
            await asyncio.sleep(WORKER_RECORD_SECONDS / _RENEWALS_PER_RECORD)
            await self._register()

    async def _register(self) -> None:
        await self._log_errors(self._write(self._record(self._draining)))

    async def _write(self, record: pb.WorkerRecord) -> None:
        # The record first: gateways remove names that have none.
        await self._client.set(
            self._key, record.SerializeToString(), px=int(WORKER_RECORD_SECONDS * 1000)
        )
        await self._client.sadd(self._names_key, self._name)

    async def _unregister(self) -> None:
        await self._client.delete(self._key)
        await self._client.srem(self._names_key, self._name)

    async def _log_errors(self, call: Any) -> None:
        try:
            await call
        except (RedisError, RedisClusterException, OSError, TimeoutError) as error:
            self._on_failure()
            self._outage.note(str(error))
        else:
            self._outage.end()
