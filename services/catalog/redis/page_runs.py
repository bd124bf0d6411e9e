"""Tenants' trees of page ids in the Redis catalog (`services.catalog.page_tree` says what they are).

A tenant's tree lies in one slot, its sessions in others. So it follows their commits: each brings the
session's whole list, which is stored with the session. One that a crash left behind is brought by the
session's next commit.
"""

from contextlib import suppress

from kvrecall.domain.errors import CatalogError
from services.catalog.page_tree import SESSIONS_FOUND
from services.catalog.records import KnownPrefix
from services.catalog.redis import scripts
from services.catalog.redis.client import CatalogRedis
from services.catalog.redis.keys import Keys


class RedisPageRuns:
    """Changes trees. What fails is left to the session's next commit."""

    def __init__(self, redis: CatalogRedis, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys

    async def extend(self, session_id: str, tenant: str, page_ids: bytes) -> None:
        """Let a session of a tenant have exactly these pages; fewer than are known change nothing."""
        if page_ids:
            await self._run(scripts.EXTEND_PAGES, tenant, session_id, page_ids)

    async def drop(self, session_id: str, tenant: str) -> None:
        """Forget a deleted session."""
        await self._run(scripts.DROP_PAGES, tenant, session_id)

    async def find(self, tenant: str, page_ids: bytes) -> KnownPrefix:
        """Find sessions that begin with the most of these pages. Raises CatalogError."""
        names = self._keys.get_page_runs(tenant)
        words = (page_ids, SESSIONS_FOUND)
        pages, *sessions = await self._redis.read(
            names[0], "EVAL", scripts.FIND_PAGES, len(names), *names, *words
        )
        return KnownPrefix(int(pages), tuple(session.decode() for session in sessions))

    async def _run(self, script: str, tenant: str, *words: str | bytes) -> None:
        names = self._keys.get_page_runs(tenant)
        with suppress(CatalogError):
            await self._redis.write(names[0], "EVAL", script, len(names), *names, *words)
