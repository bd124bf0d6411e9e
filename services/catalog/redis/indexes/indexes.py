"""Indexes across sessions in the Redis catalog: ids, and pauses by age.

These lie in slots of their own, so no commit changes them in the same step. A session is listed
before it is created and unlisted after it is deleted: an entry without a session is skipped, and
removed once it is old.
"""

import time
from typing import Any

from kvrecall.domain.sessions.session import Session
from kvrecall.domain.sessions.state_machine import SessionState
from services.catalog.quota import Countable, build_refusal
from services.catalog.records import SessionPage
from services.catalog.redis import scripts
from services.catalog.redis.connection.client import CatalogRedis
from services.catalog.redis.connection.keys import Keys
from services.catalog.redis.connection.shared import Command
from services.catalog.redis.indexes.tenant_use import RedisTenantUse
from services.catalog.redis.slot.slot import SessionSlots
from services.catalog.serialization import decode_cursor, encode_cursor

# An entry without a session that is older was left by a crash: the session is not being created.
_STALE_SECONDS = 3600.0


class RedisIndexes:
    """Sessions by age and tenant, pauses by last event. Raises CatalogError."""

    def __init__(
        self, redis: CatalogRedis, keys: Keys, slots: SessionSlots, use: RedisTenantUse
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._slots = slots
        self._use = use

    async def add(self, session: Session, last_event_at: float, limit: int | None = None) -> None:
        """List a session, and the pause it may start in, without an event before the given time.

        Raises QuotaExceeded if its tenant has `limit` others.
        """
        tenant = session.settings.tenant
        name = self._keys.get_sessions(tenant)
        tenants = self._keys.tenants
        await self._redis.write(tenants, "ZADD", tenants, repr(time.time()), tenant)
        await list_within(self._redis, name, session.created_at, session.id, limit, "sessions")
        if session.turns:
            await self.add_pause(session.id, session.turns, last_event_at)

    async def remove(self, session_id: str, tenant: str) -> None:
        """Unlist a deleted session."""
        sessions = self._keys.get_sessions(tenant)
        await self._redis.write(sessions, "ZREM", sessions, session_id)
        await self._use.remove(tenant, session_id)

    async def get_ids(self) -> list[str]:
        """Return the ids of all sessions, oldest first."""
        tenants = await self.get_tenants()
        names = [self._keys.get_sessions(tenant) for tenant, _ in tenants]
        replies = await self._redis.read_each(
            [(name, ("ZRANGE", name, 0, -1, "WITHSCORES")) for name in names]
        )
        await self._remove_tenants(
            [tenant for tenant, listed in zip(tenants, replies, strict=True) if not listed]
        )
        entries = [entry for reply in replies for entry in decode_scored(reply)]
        ids = [id for id, _ in sorted(entries, key=lambda entry: (entry[1], entry[0]))]
        exist = await self._slots.exist(ids)
        return [id for id, exists in zip(ids, exist, strict=True) if exists]

    async def get_tenants(self) -> list[tuple[str, float]]:
        """Return the tenants that may have sessions, with the last time they created one."""
        name = self._keys.tenants
        return decode_scored(await self._redis.read(name, "ZRANGE", name, 0, -1, "WITHSCORES"))

    async def get_page(self, limit: int, cursor: str | None, tenant: str) -> SessionPage:
        """Return up to `limit` sessions of a tenant, newest first. Raises InvalidRequest."""
        before = None if cursor is None else decode_cursor(cursor)
        sessions: list[Session] = []
        offset = 0
        while len(sessions) <= limit:
            listed = await self._read_listed(tenant, before, offset, limit + 1)
            if not listed:
                break
            # Entries of exactly the last time come again with each request.
            new = [entry for entry in listed if before is None or (entry[1], entry[0]) < before]
            offset = 0 if new else offset + len(listed)
            if new:
                before = (new[-1][1], new[-1][0])
                sessions += await self._get_existing(tenant, new)
        shown = tuple(sessions[:limit])
        return SessionPage(shown, encode_cursor(shown[-1]) if len(sessions) > limit else None)

    async def count(self, tenant: str) -> int:
        """Return the number of the tenant's sessions, with those whose creation has begun."""
        name = self._keys.get_sessions(tenant)
        return int(await self._redis.read(name, "ZCARD", name))

    async def count_by_state(self) -> dict[SessionState, int]:
        """Count the sessions that are listed, and those of them that are listed as paused."""
        waiting = self._keys.waiting
        names = [self._keys.get_sessions(tenant) for tenant, _ in await self.get_tenants()]
        counts = await self._redis.read_each([(name, ("ZCARD", name)) for name in names])
        paused = int(await self._redis.read(waiting, "ZCARD", waiting))
        total = sum(int(count) for count in counts)
        return {SessionState.PAUSED: paused, SessionState.IDLE: max(0, total - paused)}

    async def add_pause(self, session_id: str, turn: int, at: float) -> None:
        """List the pause after `turn`, without an event before `at`, ahead of the turn's commit."""
        name = self._keys.waiting
        await self._redis.write(name, "ZADD", name, repr(at), f"{turn} {session_id}")

    async def get_time(self) -> float:
        """Return the time of the server that lists the pauses, in Unix seconds."""
        seconds, microseconds = await self._redis.read(self._keys.waiting, "TIME")
        return float(seconds) + float(microseconds) / 1e6

    async def get_idle_sessions(self, since: float) -> list[str]:
        """Return the sessions with a pending call without an event after `since`.

        Entries of pauses that are over are removed, those of later events moved.
        """
        waiting = self._keys.waiting
        span = ("-inf", repr(since), "WITHSCORES")
        reply = await self._redis.read(waiting, "ZRANGEBYSCORE", waiting, *span)
        entries = decode_scored(reply)
        pauses = [(int(turn), id) for turn, _, id in (entry.partition(" ") for entry, _ in entries)]
        sessions = await self._slots.get_each([id for _, id in pauses])
        idle = []
        for (entry, listed_at), (turn, id), session in zip(entries, pauses, sessions, strict=True):
            oldest = _get_oldest_event(session, turn)
            if oldest is not None and oldest <= since:
                idle.append(id)
            elif oldest is not None:
                await self._redis.read(waiting, "ZADD", waiting, "XX", "GT", repr(oldest), entry)
            elif _is_over(session, turn) or listed_at < time.time() - _STALE_SECONDS:
                await self._redis.read(waiting, "ZREM", waiting, entry)
        return idle

    async def _remove_tenants(self, idle: list[tuple[str, float]]) -> None:
        """Remove tenants without sessions, except those that may be creating one now."""
        name = self._keys.tenants
        old = [each for each in idle if each[1] < time.time() - _STALE_SECONDS]
        for tenant, used_at in old:
            call = ("EVAL", scripts.REMOVE_IF_SCORED, 1, name, tenant, repr(used_at))
            await self._redis.read(name, *call)

    async def _read_listed(
        self, tenant: str, before: tuple[float, str] | None, offset: int, count: int
    ) -> list[tuple[str, float]]:
        name = self._keys.get_sessions(tenant)
        newest = "+inf" if before is None else repr(before[0])
        span = (newest, "-inf", "WITHSCORES", "LIMIT", offset, count)
        return decode_scored(await self._redis.read(name, "ZREVRANGEBYSCORE", name, *span))

    async def _get_existing(self, tenant: str, listed: list[tuple[str, float]]) -> list[Session]:
        """Return the listed sessions that exist; unlist the others if they are old."""
        sessions = await self._slots.get_each([id for id, _ in listed])
        stale = [
            id
            for (id, created_at), session in zip(listed, sessions, strict=True)
            if session is None and created_at < time.time() - _STALE_SECONDS
        ]
        if stale:
            name = self._keys.get_sessions(tenant)
            await self._redis.read(name, "ZREM", name, *stale)
        return [session for session in sessions if session is not None]


async def list_within(
    redis: CatalogRedis, name: str, score: float, entry: str, limit: int | None, what: Countable
) -> None:
    """List an entry of a tenant's in one step with the check that there is room for it.

    What is to be created is listed before: so its place is reserved, also by a creation that fails,
    until the entry is found to be stale. Raises QuotaExceeded.
    """
    words: Command = (repr(score), entry, "" if limit is None else limit)
    held = int(await redis.write(name, "EVAL", scripts.LIST_WITHIN, 1, name, *words))
    if held >= 0:
        assert limit is not None, "only a limit that was sent is reached"
        raise build_refusal(what, held + 1, limit)


def _get_oldest_event(session: Session | None, turn: int) -> float | None:
    """Return the oldest last event of the pending calls after `turn`, None if there are none."""
    if session is None or session.turns != turn:
        return None
    return min((call.last_event_at for call in session.outstanding), default=None)


def _is_over(session: Session | None, turn: int) -> bool:
    return session is not None and session.turns >= turn


def decode_scored(reply: list[Any]) -> list[tuple[str, float]]:
    """Return the members of a sorted set and their scores, of a reply with both."""
    return [(entry.decode(), float(score)) for entry, score in _pair(reply)]


def _pair(reply: list[Any]) -> list[tuple[bytes, Any]]:
    """Convert to pairs, from the reply of either version of the protocol."""
    if reply and isinstance(reply[0], bytes):
        return list(zip(reply[::2], reply[1::2], strict=True))
    return [(first, second) for first, second in reply]
