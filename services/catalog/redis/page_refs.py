"""Whose pages a session uses, in the Redis catalog.

Each owner has, in its own slot, the list of those that share its pages: with the owner's deletion the list stays, until
nobody does. A session is put there before it may use a page, and a new one before it is made. So a crash leaves at
worst an entry too many. An entry of a session that is not there does not count once it is an hour old by the clock of
the owner's server; who makes a session has half of that. If clocks were to differ by more, pages might be lost that are
computed again: time, but nothing that was said.
"""

from collections.abc import Sequence
from contextlib import suppress
from secrets import token_hex
from typing import Any

from kvrecall.domain.errors import CatalogError, UnknownSession
from kvrecall.domain.session import SharedPages
from services.catalog.base import IdempotencyRecord, OrphanedPages
from services.catalog.redis import mapping as rows
from services.catalog.redis import scripts
from services.catalog.redis.client import CatalogRedis
from services.catalog.redis.commits import RedisCommit
from services.catalog.redis.idempotency import RedisIdempotency
from services.catalog.redis.indexes import RedisIndexes
from services.catalog.redis.keys import GONE, META, OWNERS, Keys
from services.catalog.redis.prefixes import RedisPrefixes
from services.catalog.redis.sessions import RedisSessions

_COUNTED_SECONDS = 3600
_LOOKED_AT = 16
"""Sessions that were deleted before, of which a deletion or a sweep looks whether something is left to do."""


class RedisPageRefs:
    """Counts who shares what, and deletes sessions. Raises UnknownSession, CatalogError."""

    def __init__(
        self,
        link: CatalogRedis,
        keys: Keys,
        sessions: RedisSessions,
        listing: RedisIndexes,
        prefixes: RedisPrefixes,
    ) -> None:
        self._link = link
        self._keys = keys
        self._sessions = sessions
        self._listing = listing
        self._prefixes = prefixes

    async def promise(self, session: str, shared: SharedPages) -> bool:
        """Count pages that a session may come to use; False if they are no more."""
        await self._sessions.apply(session, RedisCommit().put(OWNERS, {shared.owner: shared.pages}))
        return await self._count(session, shared) is not None

    async def promise_all(self, session: str, shared: Sequence[SharedPages]) -> str:
        """Count pages of a session that is about to be made: the last time for it, in a server's seconds."""
        counted = []
        for each in shared:
            since = await self._count(session, each)
            if since is None:
                raise UnknownSession(each.owner)
            counted.append(since)
        return str(min(counted) + _COUNTED_SECONDS // 2) if counted else ""

    async def settle_on(self, session: str, shared: Sequence[SharedPages]) -> None:
        """After the commit that says what a session shares: count just these, or else too many until it is deleted."""
        pages = {each.owner: each.pages for each in shared}
        with suppress(CatalogError):
            _, owners = await self._sessions.look(session, ("HKEYS", OWNERS))
            for owner in (name.decode() for name in owners):
                await self._set(session, owner, pages.get(owner, 0))
                if owner not in pages:
                    await self._sessions.apply(session, RedisCommit().run("HDEL", OWNERS, owner))

    async def kept(self) -> list[SharedPages]:
        """Deleted sessions of which pages are still shared."""
        deleted = await self._members(self._keys.deleted, "SMEMBERS")
        found = await self._link.ask_each(
            [self._sessions.script(scripts.SHARERS, owner) for owner in deleted]
        )
        kept = []
        for owner, (lives, _, _, now, sharers) in zip(deleted, found, strict=True):
            used, _ = await self._used(sharers, int(now))
            if used and not lives:
                kept.append(SharedPages(owner, used))
        return sorted(kept, key=lambda each: each.owner)

    async def delete(self, session: str, answer: IdempotencyRecord | None) -> list[OrphanedPages]:
        """Forget a session: its leftover, then those of sessions deleted before."""
        names = self._keys.session(session)
        if not (await self._sessions.exist([session]))[0]:
            raise UnknownSession(session)
        # Noted first: whatever is not finished here is found by another deletion.
        await self._note(self._keys.deleted, "SADD", session)
        keys = [*names, self._keys.claim(session)]
        text = ""
        if answer is not None:
            assert answer.key.session == session, (
                "an answer lies with the session that its request names"
            )
            keys.append(self._keys.answer(answer.key))
            text = RedisIdempotency.text(answer, made="")
        words = (token_hex(8), RedisIdempotency.MILLISECONDS, text)
        outcome = await self._link.write(
            names[META], "EVAL", scripts.DELETE, len(keys), *keys, *words
        )
        if outcome == b"unknown":
            raise UnknownSession(session)
        if outcome == b"changed":
            raise CatalogError("the request was answered already; ask for its answer")
        with suppress(
            CatalogError
        ):  # the session is deleted; what is left to do is done by another deletion
            return await self._finish(session)
        return []

    async def leftovers(self) -> list[OrphanedPages]:
        """Pages of deleted sessions that nobody needs and that were not dropped yet.

        A session is noted before it can have some, so one that has none is noted no more. A few others are looked at
        too: a deletion that broke off has noted nothing.
        """
        found = []
        noted = await self._members(self._keys.leftovers, "SMEMBERS")
        for owner in dict.fromkeys([*noted, *await self._some_deleted()]):
            due = await self._look_at(owner)
            found += due
            if owner in noted and not due:
                await self._note(self._keys.leftovers, "SREM", owner)
        return found

    async def dropped(self, left: OrphanedPages) -> None:
        """The workers have let go of these pages."""
        key, call = self._sessions.script(scripts.DROPPED, left.session, left.keep_pages)
        await self._link.write(key, *call)

    async def _finish(self, session: str) -> list[OrphanedPages]:
        """What is to be done elsewhere once a session is deleted; whose pages are needed less by then."""
        await self._note(self._keys.leftovers, "SADD", session)
        owners = await self._leave(session)
        _, own = await self._settle(session)
        leftovers = [OrphanedPages(session, own)]
        for owner in dict.fromkeys([*owners, *await self._some_deleted()]):
            if owner != session:
                leftovers += await self._look_at(owner)
        return leftovers

    async def _leave(self, session: str) -> list[str]:
        """Have a deleted session counted and listed nowhere: the owners it shared pages of."""
        _, flat, owners = await self._sessions.look(session, ("HGETALL", GONE), ("HKEYS", OWNERS))
        gone = rows.mapping(flat)
        owners = [owner.decode() for owner in owners]
        if owners:
            await self._note(self._keys.leftovers, "SADD", *owners)
        for owner in owners:
            await self._set(session, owner, 0)
        await self._listing.remove(session, gone.get("tenant", b"").decode())
        await self._prefixes.drop(gone.get("digest", b"").decode(), session)
        name = self._keys.session(session)[OWNERS]
        await self._link.write(name, "DEL", name)
        return owners

    async def _look_at(self, owner: str) -> list[OrphanedPages]:
        """What of an owner nobody needs and the workers still have; nothing of one that lives."""
        lives, gone, told, _, _ = await self._sharers(owner)
        if lives:
            return []
        if gone and told is None:  # whoever deleted it did not come to an end
            await self._leave(owner)
        due, pages = await self._settle(owner)
        return [OrphanedPages(owner, pages)] if due else []

    async def _settle(self, owner: str) -> tuple[bool, int]:
        """Whether the workers may have more of a deleted session's pages than are needed, and how many are."""
        _, _, _, now, sharers = await self._sharers(owner)
        _, ended = await self._used(sharers, int(now))
        words = [word for share in ended for word in (share.session, share.entry)]
        key, call = self._sessions.script(scripts.SETTLE, owner, *words)
        outcome, *pages = await self._link.write(key, *call)
        if outcome == b"same" and not pages[0]:
            await self._note(self._keys.deleted, "SREM", owner)
        return outcome == b"due", int(pages[0]) if pages else 0

    async def _used(self, sharers: Sequence[bytes], now: int) -> tuple[int, list[rows.Share]]:
        """How many pages are used by those that there are, or may yet be; and the entries of all others."""
        shares = [rows.Share(name, entry) for name, entry in rows.mapping(sharers).items()]
        there = await self._sessions.exist([share.session for share in shares])
        ended = [
            share
            for share, exists in zip(shares, there, strict=True)
            if not exists and now - share.since > _COUNTED_SECONDS
        ]
        return max((share.pages for share in shares if share not in ended), default=0), ended

    async def _count(self, session: str, shared: SharedPages) -> int | None:
        key, call = self._sessions.script(scripts.SHARE, shared.owner, session, shared.pages)
        since = await self._link.write(key, *call)
        return None if since is None else int(since)

    async def _set(self, session: str, owner: str, pages: int) -> None:
        key, call = self._sessions.script(scripts.SET_SHARE, owner, session, pages)
        await self._link.write(key, *call)

    async def _sharers(self, owner: str) -> list[Any]:
        key, call = self._sessions.script(scripts.SHARERS, owner)
        found: list[Any] = await self._link.ask(key, *call)
        return found

    async def _some_deleted(self) -> list[str]:
        return await self._members(self._keys.deleted, "SRANDMEMBER", _LOOKED_AT)

    async def _members(self, name: str, command: str, *words: int) -> list[str]:
        return [owner.decode() for owner in await self._link.ask(name, command, name, *words)]

    async def _note(self, name: str, command: str, *owners: str) -> None:
        await self._link.write(name, command, name, *owners)
