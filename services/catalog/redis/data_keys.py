"""Wrapped data keys in the Redis catalog: a hash of all tenants'."""

from collections.abc import Mapping

from services.cancellation import run_to_completion
from services.catalog.redis import scripts
from services.catalog.redis.connection.client import CatalogRedis
from services.catalog.redis.connection.keys import Keys
from services.catalog.redis.mapping import to_hash


class RedisDataKeys:
    """`services.catalog.encryption.data_keys.DataKeyStore` in a hash. Raises CatalogError."""

    def __init__(self, redis: CatalogRedis, keys: Keys) -> None:
        self._redis = redis
        self._name = keys.data_keys

    async def get(self, tenant: str) -> bytes | None:
        """Return a tenant's wrapped key, None if there is none."""
        found: bytes | None = await self._redis.read(self._name, "HGET", self._name, tenant)
        return found

    async def get_all(self) -> Mapping[str, bytes]:
        """Return all wrapped keys by tenant."""
        return to_hash(await self._redis.read(self._name, "HGETALL", self._name))

    async def add(self, tenant: str, wrapped: bytes) -> bytes:
        """Store a tenant's key unless there is one; return the one that is stored now."""
        write = self._redis.write(self._name, "HSETNX", self._name, tenant, wrapped)
        await run_to_completion(write)
        return await self.get(tenant) or wrapped

    async def replace(self, tenant: str, old: bytes, new: bytes) -> None:
        """Replace a wrapped key, unless it has changed or is gone."""
        call = ("EVAL", scripts.REPLACE_FIELD, 1, self._name, tenant, new, old)
        await run_to_completion(self._redis.write(self._name, *call))

    async def delete(self, tenant: str) -> bool:
        """Delete a tenant's key, and return whether there was one."""
        found = await self.get(tenant) is not None
        await run_to_completion(self._redis.write(self._name, "HDEL", self._name, tenant))
        return found
