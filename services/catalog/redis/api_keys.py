"""API keys in the Redis catalog: a hash for each, and an index of all by their creation."""

import json
from dataclasses import replace
from typing import Any

from kvrecall.domain.errors import CatalogError
from services.cancellation import run_to_completion
from services.catalog.api_keys import KeyRecord
from services.catalog.redis.connection.client import CatalogRedis
from services.catalog.redis.connection.keys import Keys
from services.catalog.redis.connection.shared import Command


class RedisApiKeys:
    """The keys of all tenants.

    The index entry is written before the key. A crash in between leaves an entry without a key: the
    service then requires keys, and none is valid. Keys are never deleted, so that no change revives
    one.
    """

    def __init__(self, redis: CatalogRedis, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys

    async def add(self, record: KeyRecord) -> None:
        """Add a key. Raises CatalogError when its id is taken."""
        await run_to_completion(self._add(record))

    async def get(self, key_id: str) -> KeyRecord | None:
        """Return a key, None if there is none of that id."""
        name = self._keys.get_api_key(key_id)
        return _decode(await self._redis.read(name, *_build_get(name)))

    async def get_all(self) -> list[KeyRecord]:
        """Return all keys, oldest first."""
        index = self._keys.api_keys
        ids = await self._redis.read(index, "ZRANGE", index, 0, -1)
        names = [self._keys.get_api_key(id.decode()) for id in ids]
        replies = await self._redis.read_each([(name, _build_get(name)) for name in names])
        return [record for reply in replies if (record := _decode(reply)) is not None]

    async def exist(self) -> bool:
        """Return whether any key was ever made."""
        index = self._keys.api_keys
        return bool(await self._redis.read(index, "EXISTS", index))

    async def revoke(self, key_id: str, at: float) -> bool:
        """Revoke a key, and return whether there is one."""
        if await self.get(key_id) is None:
            return False
        name = self._keys.get_api_key(key_id)
        await self._redis.write(name, "HSETNX", name, "revoked_at", repr(at))
        return True

    async def touch(self, key_id: str, at: float) -> None:
        """Note the time of a key's last use; no replica is waited for."""
        name = self._keys.get_api_key(key_id)
        if await self._redis.read(name, "EXISTS", name):
            await self._redis.read(name, "HSET", name, "last_used_at", repr(at))

    async def _add(self, record: KeyRecord) -> None:
        index, name = self._keys.api_keys, self._keys.get_api_key(record.id)
        text = json.dumps(vars(replace(record, revoked_at=None, last_used_at=None)))
        await self._redis.write(index, "ZADD", index, "NX", repr(record.created_at), record.id)
        await self._redis.write(name, "HSETNX", name, "record", text)
        # The reply does not tell: a command that was sent twice finds its own record.
        if await self._redis.read(name, "HGET", name, "record") != text.encode():
            raise CatalogError(f"there is a key {record.id!r} already")


def _build_get(name: str) -> Command:
    return ("HMGET", name, "record", "revoked_at", "last_used_at")


def _decode(reply: list[Any]) -> KeyRecord | None:
    text, revoked_at, last_used_at = reply
    if text is None:
        return None
    values = json.loads(text)
    values["scopes"] = tuple(values["scopes"])
    values["revoked_at"] = None if revoked_at is None else float(revoked_at)
    values["last_used_at"] = None if last_used_at is None else float(last_used_at)
    return KeyRecord(**values)
