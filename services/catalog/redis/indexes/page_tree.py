"""The tree of page ids in the Redis catalog (`services.catalog.page_tree` says what it is).

It lies in one slot, sessions in others, so a commit takes three steps, each of which may be repeated:
the session gets its new pages beside those that it has, the commit is applied, the pages from before
are dropped. What a crash leaves in between is pages too many, which the session's next commit drops
or, where there is no session, a look at some entries. No page of a commit that stands is ever dropped:
proposals are numbered, commits follow one another as their proposals do, since a writer that takes a
session over proposes after that, and a commit drops what was proposed before it alone.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from kvrecall.domain.errors import CatalogError, ServiceError
from kvrecall.domain.page_ids import PageId
from services.catalog.redis import scripts
from services.catalog.redis.connection.client import CatalogRedis
from services.catalog.redis.connection.keys import Keys
from services.catalog.redis.connection.shared import Command
from services.catalog.redis.slot.slot import SessionSlots, was_refused

_ENTRIES_CHECKED = 100
_PAGES_AT_ONCE = 1000
_LAST = 1 << 53


class RedisPageTree:
    """Changes and reads the tree. Raises CatalogError."""

    def __init__(self, redis: CatalogRedis, keys: Keys, slots: SessionSlots) -> None:
        self._redis = redis
        self._slots = slots
        self._tree, self._dead, self._ends = self._names = keys.page_tree
        self._cursor: str | bytes = "0"

    @asynccontextmanager
    async def proposed(self, session_id: str, page_ids: bytes) -> AsyncIterator[int]:
        """Let a session have these pages too, while it is committed with them.

        Provides the number for `settle`. A commit that is refused takes the pages back.
        """
        words = (session_id, page_ids)
        number = int(await self._run(scripts.PROPOSE_PAGES, *words))
        try:
            yield number
        except ServiceError as error:
            if number and was_refused(error):
                with suppress(CatalogError):
                    await self._drop(session_id, number, number)
            raise

    async def settle(self, session_id: str, number: int) -> None:
        """Drop the pages from before a proposal, whose commit stands even if this fails."""
        if number:
            with suppress(CatalogError):
                await self._drop(session_id, 0, number - 1)

    async def drop(self, session_id: str) -> None:
        """Forget a deleted session."""
        await self._drop(session_id, 0, _LAST)

    async def drop_abandoned(self, older_than_seconds: float) -> None:
        """Forget what some proposals have left whose sessions were never created, or are deleted.

        Each call looks at some entries more.
        """
        words = (self._cursor, _ENTRIES_CHECKED, repr(older_than_seconds))
        self._cursor, *flat = await self._run(scripts.FIND_OLD_ENDS, *words)
        sessions = [session.decode() for session in flat[::2]]
        exist = await self._slots.exist(sessions)
        for session_id, last, exists in zip(sessions, flat[1::2], exist, strict=True):
            if not exists:
                await self._drop(session_id, 0, last)

    async def get_dead(self, limit: int) -> list[PageId]:
        """Return up to `limit` dead pages, oldest first."""
        found = await self._redis.read(self._dead, "ZRANGE", self._dead, 0, limit - 1)
        return list(found)

    async def count_dead(self) -> int:
        """Return the number of dead pages."""
        return int(await self._redis.read(self._dead, "ZCARD", self._dead))

    async def forget_dead(self, ids: Sequence[PageId]) -> None:
        """Forget dead pages."""
        for some in _cut(ids):
            await self._redis.write(self._dead, "ZREM", self._dead, *some)

    async def find(self, ids: Sequence[PageId], *, unknown: bool) -> list[PageId]:
        """Return those of these pages that some session has, or those that none has and that are not dead."""
        parts = _cut(ids)
        calls: list[tuple[str, Command]]
        calls = [(self._tree, ("HMGET", self._tree, *some)) for some in parts]
        if unknown:
            calls += [(self._dead, ("ZMSCORE", self._dead, *some)) for some in parts]
        replies: list[list[Any]] = await self._redis.read_each(calls)
        lives = [entry for reply in replies[: len(parts)] for entry in reply]
        if not unknown:
            return [id for id, live in zip(ids, lives, strict=True) if live is not None]
        deaths = [score for reply in replies[len(parts) :] for score in reply]
        known = zip(ids, lives, deaths, strict=True)
        return [id for id, live, dead in known if live is None and dead is None]

    async def _drop(self, session_id: str, first: int, last: int) -> None:
        await self._run(scripts.DROP_PAGES, session_id, first, last)

    async def _run(self, script: str, *words: str | bytes | int) -> Any:
        return await self._redis.write(
            self._tree, "EVAL", script, len(self._names), *self._names, *words
        )


def _cut(ids: Sequence[PageId]) -> list[Sequence[PageId]]:
    """Cut ids into parts for one command each."""
    return [ids[first : first + _PAGES_AT_ONCE] for first in range(0, len(ids), _PAGES_AT_ONCE)]
