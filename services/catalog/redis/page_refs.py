"""References to shared pages in the Redis catalog.

Each owner has, in its own slot, the references to its pages, sorted by their number of pages; after
the owner's deletion they stay as long as there are any. A session is referenced there before it uses
a page, and a new session before it is created, so a crash leaves at worst a reference too many. Each
reference is unverified until its session is known to have committed it; from then on the session's
deletion removes it. Only what is unverified is ever compared with its session, once it is an hour
old by the clock of the owner's server; the creation of a session may take half of that. If clocks
differed by more, pages might be lost: they are computed again, which takes time, but no part of a
conversation is lost.
"""

from collections.abc import Sequence
from contextlib import suppress

from kvrecall.domain.errors import CatalogError, UnknownSession
from kvrecall.domain.sessions.session import SharedPages
from services.cancellation import run_to_completion
from services.catalog.records import KnownPrefix, OrphanedPages
from services.catalog.redis import scripts
from services.catalog.redis.connection.client import CatalogRedis
from services.catalog.redis.connection.keys import OWNERS
from services.catalog.redis.deletion import SessionDeletion
from services.catalog.redis.indexes.owner_refs import GRACE_SECONDS, OwnerRefs
from services.catalog.redis.indexes.page_runs import RedisPageRuns
from services.catalog.redis.slot.commits import RedisCommit
from services.catalog.redis.slot.slot import SessionSlots


class RedisPageRefs:
    """References to pages of other sessions, and pages without references."""

    def __init__(
        self,
        redis: CatalogRedis,
        slots: SessionSlots,
        refs: OwnerRefs,
        runs: RedisPageRuns,
        deletion: SessionDeletion,
    ) -> None:
        self._redis = redis
        self._slots = slots
        self._refs = refs
        self._runs = runs
        self._deletion = deletion

    async def reserve(self, session_id: str, shared: SharedPages) -> bool:
        """Reference pages before use; False if they are gone. Raises UnknownSession."""
        return await run_to_completion(self.add_ref(session_id, shared))

    async def find_prefix(self, tenant: str, page_ids: bytes) -> KnownPrefix:
        """Find the tenant's sessions that begin with the most of these pages."""
        return await self._runs.find(tenant, page_ids)

    async def get_retained(self) -> list[SharedPages]:
        """Return the deleted sessions whose pages are still referenced."""
        owners = sorted(await self._deletion.get_deleted())
        states = await self._refs.read(owners)
        return [
            SharedPages(owner, state.used)
            for owner, state in zip(owners, states, strict=True)
            if state.used and not state.exists
        ]

    async def find_unknown(self, session_ids: Sequence[str]) -> list[OrphanedPages]:
        """Return those of the sessions that do not exist, with their pages that are referenced."""
        exist = await self._slots.exist(list(session_ids))
        unknown = [id for id, exists in zip(session_ids, exist, strict=True) if not exists]
        return [
            OrphanedPages(owner, state.used)
            for owner, state in zip(unknown, await self._refs.read(unknown), strict=True)
            if not state.exists
        ]

    async def begin_creation(self, session_id: str) -> None:
        """Note that workers write pages of a session before it is committed."""
        await run_to_completion(self._deletion.begin_creation(session_id))

    async def get_orphaned(self) -> list[OrphanedPages]:
        """Return the orphaned pages that are not confirmed as deleted yet."""
        return await run_to_completion(self._deletion.get_orphaned())

    async def confirm_deleted(self, orphaned: OrphanedPages) -> None:
        """Note that the workers have deleted these pages."""
        key, call = self._slots.build_call(
            scripts.CONFIRM_DELETED, orphaned.session, orphaned.keep_pages
        )
        await run_to_completion(self._redis.write(key, *call))

    async def add_ref(self, session_id: str, shared: SharedPages) -> bool:
        """Reference pages of an existing session; False if they are gone."""
        commit = RedisCommit().put(OWNERS, {shared.owner: shared.pages})
        await self._slots.apply(session_id, commit)
        return await self._refs.add(session_id, shared) is not None

    async def reserve_all(self, session_id: str, shared: Sequence[SharedPages]) -> str:
        """Reference pages of a session that is about to be created.

        Returns the last time for its creation, in the server's Unix seconds; empty if there are no
        pages. Raises UnknownSession when pages are gone.
        """
        noted = []
        for each in shared:
            since = await self._refs.add(session_id, each)
            if since is None:
                raise UnknownSession(each.owner)
            noted.append(since)
        return str(min(noted) + GRACE_SECONDS // 2) if noted else ""

    async def confirm(self, session_id: str, shared: Sequence[SharedPages]) -> None:
        """Note that a session exists and has committed these references.

        If this fails, they are compared with the session later.
        """
        with suppress(CatalogError):
            for each in shared:
                await self._refs.set(session_id, each.owner, each.pages)

    async def reconcile(self, session_id: str, shared: Sequence[SharedPages]) -> None:
        """Remove the references beyond those that a turn has committed.

        If this fails, they stay until the session is deleted.
        """
        pages = {each.owner: each.pages for each in shared}
        with suppress(CatalogError):
            _, names = await self._slots.read(session_id, ("HKEYS", OWNERS))
            for owner in (name.decode() for name in names):
                await self._refs.set(session_id, owner, pages.get(owner, 0))
                if owner not in pages:
                    await self._slots.apply(session_id, RedisCommit().run("HDEL", OWNERS, owner))
