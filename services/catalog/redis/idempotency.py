"""Responses by idempotency key in the Redis catalog; each expires after a day."""

import json

from kvrecall.domain.errors import CatalogError, IdempotencyConflict
from services.catalog.records import IdempotencyKey, IdempotencyRecord
from services.catalog.redis import scripts
from services.catalog.redis.client import CatalogRedis
from services.catalog.redis.keys import Keys


class RedisIdempotency:
    """Responses to requests.

    Records of requests that create a session are written here, all others by the commit itself in
    the session's slot.
    """

    MILLISECONDS = 24 * 3600 * 1000

    def __init__(self, redis: CatalogRedis, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys

    @staticmethod
    def encode(record: IdempotencyRecord, created: str) -> str:
        """Encode a record; `created` is the session that its request created (empty: none)."""
        return json.dumps([created, record.key.fingerprint, record.response])

    async def reserve(self, record: IdempotencyRecord | None, created: str) -> None:
        """Store a record before its request creates a session; it is invalid without the session.

        Raises CatalogError when there is a valid record under the key.
        """
        if record is None:
            return
        name = self._keys.get_record(record.key)
        text = self.encode(record, created)
        found = await self._set_if_equal(name, text, "")
        if found != text and not await self._is_valid(found):
            found = await self._set_if_equal(name, text, found)
        if found != text:
            raise CatalogError("the request was answered already; ask for its answer")

    async def get(self, key: IdempotencyKey) -> str | None:
        """Return the stored response. Raises IdempotencyConflict when the body differs."""
        name = self._keys.get_record(key)
        found: bytes | None = await self._redis.read(name, "GET", name)
        if found is None or not await self._is_valid(found.decode()):
            return None
        _, fingerprint, response = json.loads(found)
        if fingerprint != key.fingerprint:
            raise IdempotencyConflict(key.key)
        return str(response)

    async def _is_valid(self, text: str) -> bool:
        created = json.loads(text)[0]
        meta = self._keys.get_meta(created)
        return not created or bool(await self._redis.read(meta, "EXISTS", meta))

    async def _set_if_equal(self, name: str, text: str, old: str) -> str:
        call = ("EVAL", scripts.SET_IF_EQUAL, 1, name, text, old, self.MILLISECONDS)
        return bytes(await self._redis.write(name, *call)).decode()
