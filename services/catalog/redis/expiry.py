"""Sessions that are deleted after a time without a turn, in the Redis catalog.

A sorted set has all of them by a time before which they do not expire, another per tenant the
tenant's by the time of their expiry, each in a slot of its own. A session is listed in both before
it is created. A turn moves it in its tenant's set alone, after the commit, which stands without
that: a sweep finds the session by its old time and moves it then. So a sweep reads what is due by
that first set and nothing else, a session with turns once in a lifetime.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import quote, unquote

from kvrecall.domain.errors import CatalogError
from kvrecall.domain.sessions.session import Session
from services.catalog.redis import scripts
from services.catalog.redis.connection.client import CatalogRedis
from services.catalog.redis.connection.keys import Keys
from services.catalog.redis.connection.shared import Command
from services.catalog.redis.indexes.indexes import RedisIndexes, decode_scored
from services.catalog.redis.slot.slot import SessionSlots

# An entry without a session that was due longer ago was left by a crash: no creation takes so long.
_STALE_SECONDS = 3600.0


@dataclass(frozen=True)
class _Entry:
    """An entry of the set of all sessions: one of `tenant`, which does not expire before `at`."""

    session: str
    tenant: str
    at: float


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
            for name, member in self._get_places(session.id, session.settings.tenant):
                await self._set(name, member, lifetime)

    async def set(self, session_id: str, tenant: str, lifetime: float) -> None:
        """List a session after a commit, which stands even if this fails."""
        with suppress(CatalogError):
            await self._set(self._keys.get_expiring(tenant), session_id, lifetime)

    async def remove(self, session_id: str, tenant: str) -> None:
        """Unlist a deleted session."""
        for name, member in self._get_places(session_id, tenant):
            await self._redis.write(name, "ZREM", name, member)

    async def get_expired(self, limit: int) -> list[Session]:
        """Return up to `limit` sessions that have expired; correct entries that say so wrongly."""
        now = await self._indexes.get_time()
        expired: list[Session] = []
        kept = 0
        while len(expired) < limit:
            due = await self._read_due(now, kept, limit)
            found, corrected = await self._check(due, now)
            expired += found
            kept += len(due) - corrected
            if len(due) < limit:
                break
        return expired[:limit]

    async def get_next(self, tenant: str, limit: int) -> list[Session]:
        """Return up to `limit` of a tenant's sessions that are to expire, the next one first."""
        name = self._keys.get_expiring(tenant)
        ids = [id.decode() for id in await self._redis.read(name, "ZRANGE", name, 0, limit - 1)]
        sessions = await self._slots.get_each(ids)
        return [session for session in sessions if session is not None]

    async def _read_due(self, now: float, first: int, count: int) -> list[_Entry]:
        name = self._keys.expiring
        words = ("-inf", repr(now), "WITHSCORES", "LIMIT", first, count)
        reply = await self._redis.read(name, "ZRANGEBYSCORE", name, *words)
        return [_Entry(*decode_member(member), at) for member, at in decode_scored(reply)]

    async def _check(self, due: list[_Entry], now: float) -> tuple[list[Session], int]:
        """Return the sessions that have expired, and the number of entries that were wrong.

        What a crash left listed is unlisted, a session with a later turn listed by that.
        """
        expired = list[Session]()
        corrections = list[list[tuple[str, Command]]]()
        sessions = await self._slots.get_each([entry.session for entry in due])
        for entry, session in zip(due, sessions, strict=True):
            places = self._get_places(entry.session, entry.tenant)
            lifetime = None if session is None else session.settings.get_lifetime(session.turns)
            if session is None and entry.at > now - _STALE_SECONDS:
                continue  # it may be being created
            if session is None or lifetime is None:
                corrections.append([(name, ("ZREM", name, member)) for name, member in places])
            elif session.updated_at + lifetime > now:
                at = repr(session.updated_at + lifetime)
                corrections.append(
                    [(name, ("ZADD", name, "XX", "GT", at, member)) for name, member in places]
                )
            else:
                expired.append(session)
        await self._redis.read_each([command for each in corrections for command in each])
        return expired, len(corrections)

    def _get_places(self, session_id: str, tenant: str) -> Sequence[tuple[str, str]]:
        """Return the two sets that list a session, each with its name there."""
        return (
            (self._keys.expiring, encode_member(session_id, tenant)),
            (self._keys.get_expiring(tenant), session_id),
        )

    async def _set(self, name: str, member: str, lifetime: float) -> None:
        call = ("EVAL", scripts.SET_EXPIRY, 1, name, member, repr(lifetime))
        await self._redis.write(name, *call)


def encode_member(session_id: str, tenant: str) -> str:
    """Return the name of a session in the set of all sessions."""
    return f"{quote(tenant, safe='')} {session_id}"


def decode_member(member: str) -> tuple[str, str]:
    """Return the session and the tenant that `encode_member` was given."""
    tenant, _, session = member.partition(" ")
    return session, unquote(tenant)
