"""Where a gateway learns which workers there are: from Redis, where they announce themselves, or from its settings."""

from collections.abc import Sequence
from typing import Any, Protocol

from redis.exceptions import RedisClusterException, RedisError

from kvrecall.domain.errors import RegistryError
from kvrecall.protocol.v1 import worker_key, workers_key
from kvrecall.protocol.v1 import worker_pb2 as wire


class Registry(Protocol):
    """What is known of the workers before any is asked. `loads`: the records say what each worker has to do."""

    loads: bool

    async def records(self) -> list[wire.WorkerRecord]:
        """The workers that should be there. Raises RegistryError when nobody can say."""
        ...

    async def close(self) -> None:
        """Let go of the connection."""
        ...


class StaticRegistry:
    """Workers at addresses that an operator named: each is called as its address."""

    loads = False

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = addresses

    async def records(self) -> list[wire.WorkerRecord]:
        """All of them, whether they run or not."""
        return [wire.WorkerRecord(name=address, address=address) for address in self._addresses]

    async def close(self) -> None:
        """There is nothing to let go of."""


class RedisRegistry:
    """Workers that announce themselves in Redis, each with a record that ends when it is not renewed."""

    loads = True

    def __init__(self, client: Any, namespace: str) -> None:
        self._client = client
        self._namespace = namespace

    async def records(self) -> list[wire.WorkerRecord]:
        """Every worker that was heard of a moment ago."""
        try:
            return await self._records()
        except (RedisError, RedisClusterException, OSError, TimeoutError) as error:
            raise RegistryError(f"the workers' registry cannot be read: {error}") from error

    async def _records(self) -> list[wire.WorkerRecord]:
        key = workers_key(self._namespace)
        names = sorted(_text(name) for name in await self._client.smembers(key))
        if not names:
            return []
        found = await self._client.mget([worker_key(self._namespace, name) for name in names])
        gone = [name for name, record in zip(names, found, strict=True) if record is None]
        if gone:
            await self._client.srem(key, *gone)  # one that comes back adds itself again
        return [wire.WorkerRecord.FromString(record) for record in found if record is not None]

    async def close(self) -> None:
        """Close the connection."""
        await self._client.aclose()


def _text(name: bytes | str) -> str:
    return name.decode() if isinstance(name, bytes) else name
