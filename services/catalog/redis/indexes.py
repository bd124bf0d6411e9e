"""What the Redis catalog knows across sessions: which there are, which wait for a call, how many tokens a tenant has.

These lie in slots of their own, so no commit changes them in the same step. A session is listed before it is made and
unlisted after it is deleted: an entry without a session is passed over, and removed once it is old. Lengths are written
after the commit; a few are compared with the sessions whenever they are asked for, so that what a crash left out is
found.
"""

import time
from contextlib import suppress
from typing import Any

from kvrecall.domain.errors import CatalogError
from kvrecall.domain.session import Session
from services.catalog.base import SessionPage
from services.catalog.redis import scripts
from services.catalog.redis.client import CatalogRedis
from services.catalog.redis.keys import Keys
from services.catalog.redis.sessions import RedisSessions
from services.catalog.serialization import cursor_text, cursor_value

_STALE_SECONDS = 3600.0
"""An entry without a session that is older was left by a crash: nobody is making the session any more."""
_COMPARED = 4


class RedisIndexes:
    """Sessions by age and tenant, pauses by silence, lengths by tenant. Raises CatalogError."""

    def __init__(self, link: CatalogRedis, keys: Keys, sessions: RedisSessions) -> None:
        self._link = link
        self._keys = keys
        self._sessions = sessions

    async def add(self, session: Session, last_event_at: float) -> None:
        """List a session, and the pause it may begin in, in which nothing was heard before `last_event_at`."""
        tenant = session.settings.tenant
        name = self._keys.sessions(tenant)
        await self._link.write(self._keys.tenants, "SADD", self._keys.tenants, tenant)
        await self._link.write(name, "ZADD", name, repr(session.created_at), session.id)
        if session.turns:
            await self.pause(session.id, session.turns, last_event_at)

    async def remove(self, session: str, tenant: str) -> None:
        """Forget a session that is no more."""
        listed = self._keys.sessions(tenant)
        lengths = self._keys.lengths(tenant)
        await self._link.write(listed, "ZREM", listed, session)
        await self._link.write(lengths, "HDEL", lengths, session)

    async def ids(self) -> list[str]:
        """Every session there is, the oldest first."""
        tenants = [
            tenant.decode()
            for tenant in await self._link.ask(self._keys.tenants, "SMEMBERS", self._keys.tenants)
        ]
        names = [self._keys.sessions(tenant) for tenant in tenants]
        replies = await self._link.ask_each(
            [(name, ("ZRANGE", name, 0, -1, "WITHSCORES")) for name in names]
        )
        listed = sorted(
            (entry for reply in replies for entry in _scored(reply)),
            key=lambda entry: (entry[1], entry[0]),
        )
        ids = [id for id, _ in listed]
        return [id for id, there in zip(ids, await self._sessions.exist(ids), strict=True) if there]

    async def page(self, limit: int, cursor: str | None, tenant: str) -> SessionPage:
        """Some sessions of a tenant, newest first. Raises InvalidRequest."""
        before = None if cursor is None else cursor_value(cursor)
        found: list[Session] = []
        skipped = 0
        while len(found) <= limit:
            listed = await self._listed(tenant, before, skipped, limit + 1)
            if not listed:
                break
            # Those of the very same time come again with each request.
            further = [entry for entry in listed if before is None or (entry[1], entry[0]) < before]
            skipped = 0 if further else skipped + len(listed)
            if further:
                before = (further[-1][1], further[-1][0])
                found += await self._there(tenant, further)
        shown = tuple(found[:limit])
        return SessionPage(shown, cursor_text(shown[-1]) if len(found) > limit else None)

    async def pause(self, session: str, turn: int, at: float) -> None:
        """Look at a session's pause after `turn` once nothing was heard since `at`: said before there is the turn."""
        await self._link.write(
            self._keys.waiting, "ZADD", self._keys.waiting, repr(at), f"{turn} {session}"
        )

    async def silent(self, since: float) -> list[str]:
        """The sessions that wait for a call of which nothing was heard after `since`."""
        waiting = self._keys.waiting
        reply = await self._link.ask(
            waiting, "ZRANGEBYSCORE", waiting, "-inf", repr(since), "WITHSCORES"
        )
        entries = _scored(reply)
        pauses = [(int(turn), id) for turn, _, id in (entry.partition(" ") for entry, _ in entries)]
        found = await self._sessions.read_each([id for _, id in pauses])
        silent = []
        for (entry, noted), (turn, id), session in zip(entries, pauses, found, strict=True):
            heard = (
                [call.last_event_at for call in session.outstanding]
                if session and session.turns == turn
                else []
            )
            if heard and min(heard) <= since:
                silent.append(id)
            elif heard:
                await self._link.ask(waiting, "ZADD", waiting, "XX", "GT", repr(min(heard)), entry)
            elif (
                session is not None and session.turns >= turn
            ) or noted < time.time() - _STALE_SECONDS:
                await self._link.ask(waiting, "ZREM", waiting, entry)
        return silent

    async def note_length(self, session: str, tenant: str, length: int) -> None:
        """How many tokens a session has since a commit, which stands even if this cannot be noted."""
        name = self._keys.lengths(tenant)
        with suppress(CatalogError):
            await self._link.ask(name, "HSET", name, session, length)

    async def tokens(self, tenant: str) -> int:
        """Tokens of a tenant's sessions together."""
        name = self._keys.lengths(tenant)
        await self._compare(name)
        return int(await self._link.ask(name, "EVAL", scripts.SUM, 1, name))

    async def _compare(self, name: str) -> None:
        """Correct a few lengths, any."""
        some = _paired(await self._link.ask(name, "HRANDFIELD", name, _COMPARED, "WITHVALUES"))
        metas = [self._keys.meta(session.decode()) for session, _ in some]
        lengths = await self._link.ask_each([(meta, ("HGET", meta, "length")) for meta in metas])
        for (session, noted), length in zip(some, lengths, strict=True):
            if noted != length:
                await self._link.ask(
                    name, "EVAL", scripts.CORRECT, 1, name, session, noted, length or ""
                )

    async def _listed(
        self, tenant: str, before: tuple[float, str] | None, skipped: int, most: int
    ) -> list[tuple[str, float]]:
        name = self._keys.sessions(tenant)
        newest = "+inf" if before is None else repr(before[0])
        span = (newest, "-inf", "WITHSCORES", "LIMIT", skipped, most)
        return _scored(await self._link.ask(name, "ZREVRANGEBYSCORE", name, *span))

    async def _there(self, tenant: str, listed: list[tuple[str, float]]) -> list[Session]:
        """Those that there are; the others are unlisted if they are old."""
        found = await self._sessions.read_each([id for id, _ in listed])
        stale = [
            id
            for (id, created), session in zip(listed, found, strict=True)
            if session is None and created < time.time() - _STALE_SECONDS
        ]
        if stale:
            name = self._keys.sessions(tenant)
            await self._link.ask(name, "ZREM", name, *stale)
        return [session for session in found if session is not None]


def _scored(reply: list[Any]) -> list[tuple[str, float]]:
    return [(entry.decode(), float(score)) for entry, score in _paired(reply)]


def _paired(reply: list[Any]) -> list[tuple[bytes, Any]]:
    """Pairs, however the version of the protocol lists them."""
    if reply and isinstance(reply[0], bytes):
        return list(zip(reply[::2], reply[1::2], strict=True))
    return [(first, second) for first, second in reply]
