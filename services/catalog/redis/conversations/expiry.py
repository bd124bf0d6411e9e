"""Sessions that are deleted after a time without a turn, in the Redis catalog.

A sorted set per tenant, in a slot of its own, of the times of the server that holds it. A session
is listed before it is created and again after each commit, which stands without that: what an entry
says is compared with its session before it counts.
"""

from contextlib import suppress

from kvrecall.domain.errors import CatalogError
from kvrecall.domain.session import Session
from services.catalog.redis import scripts
from services.catalog.redis.client import CatalogRedis
from services.catalog.redis.indexes import RedisIndexes
from services.catalog.redis.keys import Keys
from services.catalog.redis.slot import SessionSlots

# The number of tenants that one round trip asks for.
_TENANTS_AT_ONCE = 500


class RedisExpiry:
    """Sessions by the time of their expiry, which each turn sets anew. Raises CatalogError."""

    def __init__(
        self, redis: CatalogRedis, keys: Keys, slots: SessionSlots, indexes: RedisIndexes
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._slots = slots
        self._indexes = indexes

    async def add(self, session: Session) -> None:
        """List a session before it is created."""
        lifetime = session.settings.get_lifetime(session.turns)
        if lifetime is not None:
            await self._set(session.id, session.settings.tenant, lifetime)

    async def set(self, session_id: str, tenant: str, lifetime: float) -> None:
        """List a session after a commit, which stands even if this fails."""
        with suppress(CatalogError):
            await self._set(session_id, tenant, lifetime)

    async def get_expired(self, limit: int) -> list[Session]:
        """Return up to `limit` sessions that have expired; correct entries that say so wrongly."""
        now = await self._indexes.get_time()
        tenants = [tenant for tenant, _ in await self._indexes.get_tenants()]
        expired: list[Session] = []
        for first in range(0, len(tenants), _TENANTS_AT_ONCE):
            names = [
                self._keys.get_expiring(tenant)
                for tenant in tenants[first : first + _TENANTS_AT_ONCE]
            ]
            words = ("-inf", repr(now), "LIMIT", 0, limit)
            replies = await self._redis.read_each(
                [(name, ("ZRANGEBYSCORE", name, *words)) for name in names]
            )
            for name, reply in zip(names, replies, strict=True):
                ids = [id.decode() for id in reply]
                expired += await self._check(name, ids, now)
            if len(expired) >= limit:
                break
        return expired[:limit]

    async def get_next(self, tenant: str, limit: int) -> list[Session]:
        """Return up to `limit` of a tenant's sessions that are to expire, the next one first."""
        name = self._keys.get_expiring(tenant)
        ids = [id.decode() for id in await self._redis.read(name, "ZRANGE", name, 0, limit - 1)]
        sessions = await self._slots.get_each(ids)
        return [session for session in sessions if session is not None]

    async def _check(self, name: str, ids: list[str], now: float) -> list[Session]:
        """Return the sessions that have expired.

        What a crash left listed is unlisted, a session with a later turn listed by that.
        """
        expired = []
        for id, session in zip(ids, await self._slots.get_each(ids), strict=True):
            lifetime = None if session is None else session.settings.get_lifetime(session.turns)
            if session is None or lifetime is None:
                await self._redis.read(name, "ZREM", name, id)
            elif session.updated_at + lifetime > now:
                at = repr(session.updated_at + lifetime)
                await self._redis.read(name, "ZADD", name, "XX", "GT", at, id)
            else:
                expired.append(session)
        return expired

    async def _set(self, session_id: str, tenant: str, lifetime: float) -> None:
        name = self._keys.get_expiring(tenant)
        call = ("EVAL", scripts.SET_EXPIRY, 1, name, session_id, repr(lifetime))
        await self._redis.write(name, *call)
