"""Responses by idempotency key in the Redis catalog; each expires after a day."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from kvrecall.domain.errors import CatalogError, IdempotencyConflict
from services.catalog.encryption.answers import open_answer, seal_answer
from services.catalog.encryption.encryption import Encryption
from services.catalog.records import IdempotencyKey, IdempotencyRecord
from services.catalog.redis import scripts
from services.catalog.redis.connection.client import CatalogRedis
from services.catalog.redis.connection.keys import Keys

# The longest time that a creation keeps others with its key waiting, if its process was killed.
_CLAIM_SECONDS = 10.0
_PAUSE_SECONDS = 0.02


class RedisIdempotency:
    """Responses to requests.

    Records of requests that create a session are written here, all others by the commit itself in
    the session's slot.
    """

    MILLISECONDS = 24 * 3600 * 1000

    def __init__(self, redis: CatalogRedis, keys: Keys, encryption: Encryption) -> None:
        self._redis = redis
        self._keys = keys
        self._tenants = encryption.tenants

    async def seal(self, record: IdempotencyRecord | None) -> IdempotencyRecord | None:
        """Return a record as it is stored."""
        return await seal_answer(self._tenants, record)

    @staticmethod
    def encode(record: IdempotencyRecord, created: str) -> str:
        """Encode a sealed record; `created` is the session that its request created (empty: none)."""
        return json.dumps([created, record.key.fingerprint, record.response])

    @asynccontextmanager
    async def reserved(self, record: IdempotencyRecord | None, created: str) -> AsyncIterator[None]:
        """Store a sealed record; inside, its request creates a session, without which it is invalid.

        Of requests with one key each waits until the one before has its session: its record would be
        taken for invalid until then. Raises CatalogError when there is a valid record under the key.
        """
        if record is None:
            yield
            return
        name = self._keys.get_record(record.key)
        claim = f"{name}:claim"
        await self._claim(claim, created)
        try:
            await self._reserve(name, self.encode(record, created))
            yield
        finally:
            with suppress(CatalogError):  # it expires soon
                await self._redis.read(claim, "EVAL", scripts.DELETE_IF_EQUAL, 1, claim, created)

    async def _claim(self, claim: str, holder: str) -> None:
        """Wait until no other request with the key creates a session. Raises CatalogError."""
        words = (holder, holder, round(1000 * _CLAIM_SECONDS))
        until = time.monotonic() + 2 * _CLAIM_SECONDS
        while time.monotonic() < until:
            found = await self._redis.read(claim, "EVAL", scripts.SET_IF_EQUAL, 1, claim, *words)
            if bytes(found) == holder.encode():
                return
            await asyncio.sleep(_PAUSE_SECONDS)
        raise CatalogError("other requests with this idempotency key go on; send it again later")

    async def _reserve(self, name: str, text: str) -> None:
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
        _, *stored = json.loads(found)
        fingerprint, response = await open_answer(self._tenants, key, *stored)
        if fingerprint != key.fingerprint:
            raise IdempotencyConflict(key.key)
        return response

    async def _is_valid(self, text: str) -> bool:
        created = json.loads(text)[0]
        meta = self._keys.get_meta(created)
        return not created or bool(await self._redis.read(meta, "EXISTS", meta))

    async def _set_if_equal(self, name: str, text: str, old: str) -> str:
        call = ("EVAL", scripts.SET_IF_EQUAL, 1, name, text, old, self.MILLISECONDS)
        return bytes(await self._redis.write(name, *call)).decode()
