"""Sessions of the Redis catalog that remember each other.

A sorted set of each memory has its sessions by creation, in a slot of its own. A session is listed before it
is created, and unlisted after it is deleted; an entry without a session is skipped, and removed once it is old.
"""

import time
from contextlib import suppress

from kvrecall.domain.errors import CatalogError
from kvrecall.domain.sessions.session import Session
from services.catalog.encryption.encryption import Encryption
from services.catalog.redis.connection.client import CatalogRedis
from services.catalog.redis.connection.keys import Keys
from services.catalog.redis.indexes.indexes import decode_scored
from services.catalog.redis.slot.slot import SessionSlots

# An entry without a session that is older was left by a crash: no creation takes so long.
_STALE_SECONDS = 3600.0


class RedisMemories:
    """The sessions that remember each other, by the name of their memory. Raises CatalogError."""

    def __init__(
        self, redis: CatalogRedis, keys: Keys, slots: SessionSlots, encryption: Encryption
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._slots = slots
        self._name = encryption.name_digest

    async def add(self, session: Session) -> None:
        """List a session in its memory, if it has one, before it is created."""
        if memory := session.settings.memory:
            name = self._keys.get_memory(self._name(memory))
            await self._redis.write(name, "ZADD", name, repr(session.created_at), session.id)

    async def remove(self, session: Session) -> None:
        """Unlist a deleted session; it is deleted even if this fails."""
        if memory := session.settings.memory:
            name = self._keys.get_memory(self._name(memory))
            with suppress(CatalogError):
                await self._redis.write(name, "ZREM", name, session.id)

    async def get_newest(self, tenant: str, memory: str, limit: int) -> list[Session]:
        """Return up to `limit` sessions of a tenant's memory, the newest first."""
        name = self._keys.get_memory(self._name(memory))
        found: list[Session] = []
        stale: list[str] = []
        first = 0
        while len(found) < limit:
            span = (first, first + limit - 1, "WITHSCORES")
            listed = decode_scored(await self._redis.read(name, "ZREVRANGE", name, *span))
            sessions = await self._slots.get_each([id for id, _ in listed])
            for (id, created_at), session in zip(listed, sessions, strict=True):
                if session is not None and session.settings.tenant == tenant:
                    found.append(session)
                elif session is None and created_at < time.time() - _STALE_SECONDS:
                    stale.append(id)
            first += limit
            if len(listed) < limit:
                break
        if stale:
            await self._redis.read(name, "ZREM", name, *stale)
        return found[:limit]
