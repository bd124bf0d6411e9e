"""Registries of workers: Redis, where workers register themselves, or a list of addresses."""

from collections.abc import Sequence
from typing import Any, Protocol

from redis.exceptions import RedisClusterException, RedisError

from kvrecall.domain.errors import RegistryError
from kvrecall.protocol.v1 import worker_key, workers_key
from kvrecall.protocol.v1 import worker_pb2 as pb


class Registry(Protocol):
    """The workers that should be reachable. `loads`: the records include each worker's load."""

    loads: bool

    async def records(self) -> list[pb.WorkerRecord]:
        """The workers' records. Raises RegistryError if the registry cannot be read."""
        ...

    async def close(self) -> None:
        """Close the connection."""
        ...


class StaticRegistry:
    """Workers at the addresses of the settings; the address is the name."""

    loads = False

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = addresses

    async def records(self) -> list[pb.WorkerRecord]:
        """A record for each address, whether its worker runs or not."""
        return [pb.WorkerRecord(name=address, address=address) for address in self._addresses]

    async def close(self) -> None:
        """Do nothing: there is no connection."""


class RedisRegistry:
    """Workers that register themselves in Redis; a record expires unless it is renewed."""

    loads = True

    def __init__(self, client: Any, namespace: str) -> None:
        self._client = client
        self._namespace = namespace

    async def records(self) -> list[pb.WorkerRecord]:
        """Every worker with a record that has not expired."""
        try:
            return await self._records()
        except (RedisError, RedisClusterException, OSError, TimeoutError) as error:
            raise RegistryError(f"the workers' registry cannot be read: {error}") from error

    async def _records(self) -> list[pb.WorkerRecord]:
        key = workers_key(self._namespace)
        names = sorted(_decode(name) for name in await self._client.smembers(key))
        if not names:
            return []
        values = await self._client.mget([worker_key(self._namespace, name) for name in names])
        expired = [name for name, record in zip(names, values, strict=True) if record is None]
        if expired:
            await self._client.srem(key, *expired)  # a worker that is back adds itself again
        return [pb.WorkerRecord.FromString(record) for record in values if record is not None]

    async def close(self) -> None:
        """Close the connection."""
        await self._client.aclose()


def _decode(name: bytes | str) -> str:
    return name.decode() if isinstance(name, bytes) else name
