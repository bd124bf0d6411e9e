"""Tenants' trees of page ids in the Redis catalog (`services.catalog.page_tree` says what they are).

A tenant's tree lies in one slot, its sessions in others. So it follows their commits: each brings the
session's whole list, which is stored with the session. One that a crash left behind is brought by the
session's next commit, a session that a deletion left there by a look-up that finds it.
"""

from contextlib import suppress

from kvrecall.domain.errors import CatalogError
from services.catalog.page_tree import SESSIONS_FOUND
from services.catalog.records import KnownPrefix
from services.catalog.redis import scripts
from services.catalog.redis.connection.client import CatalogRedis
from services.catalog.redis.connection.keys import Keys
from services.catalog.redis.slot.slot import SessionSlots

# How often pages are looked up while there are only deleted sessions that begin with them.
_LOOK_UPS = 4


class RedisPageRuns:
    """Changes and reads tenants' trees."""

    def __init__(self, redis: CatalogRedis, keys: Keys, slots: SessionSlots) -> None:
        self._redis = redis
        self._keys = keys
        self._slots = slots

    async def extend(self, session_id: str, tenant: str, page_ids: bytes) -> None:
        """Let a session of a tenant have exactly these pages; fewer than are known change nothing.

        The commit stands even if this fails.
        """
        if page_ids:
            with suppress(CatalogError):
                await self._run(scripts.EXTEND_PAGES, tenant, session_id, page_ids)

    async def drop(self, session_id: str, tenant: str) -> None:
        """Forget a deleted session. Raises CatalogError."""
        await self._run(scripts.DROP_PAGES, tenant, session_id)

    async def find(self, tenant: str, page_ids: bytes) -> KnownPrefix:
        """Find sessions that begin with the most of these pages. Raises CatalogError.

        Those are forgotten whose deletion did not come so far, and others are looked for.
        """
        for _ in range(_LOOK_UPS):
            found = await self._find(tenant, page_ids)
            exist = await self._slots.exist(list(found.sessions))
            gone = [id for id, exists in zip(found.sessions, exist, strict=True) if not exists]
            if not gone:
                return found
            for session_id in gone:
                await self.drop(session_id, tenant)
        return KnownPrefix(0, ())

    async def _find(self, tenant: str, page_ids: bytes) -> KnownPrefix:
        names = self._keys.get_page_runs(tenant)
        words = (page_ids, SESSIONS_FOUND)
        pages, *sessions = await self._redis.read(
            names[0], "EVAL", scripts.FIND_PAGES, len(names), *names, *words
        )
        return KnownPrefix(int(pages), tuple(session.decode() for session in sessions))

    async def _run(self, script: str, tenant: str, *words: str | bytes) -> None:
        names = self._keys.get_page_runs(tenant)
        await self._redis.write(names[0], "EVAL", script, len(names), *names, *words)
