"""Deletion of sessions in the Redis catalog, and the pages that it orphans.

A session whose creation was abandoned is treated as a deleted one.

A deletion spans several slots. It first notes the session as deleted, then deletes it in its slot,
where a tombstone remains, then cleans up elsewhere. A deletion that breaks off is finished by any
later deletion or sweep that meets its tombstone.
"""

from collections.abc import Sequence
from contextlib import suppress
from secrets import token_hex

from kvrecall.domain.errors import CatalogError, UnknownSession
from services.catalog.records import CREATION_SECONDS, IdempotencyRecord, OrphanedPages
from services.catalog.redis import mapping, scripts
from services.catalog.redis.connection.client import CatalogRedis
from services.catalog.redis.connection.keys import META, OWNERS, TOMBSTONE, Keys
from services.catalog.redis.connection.shared import Command
from services.catalog.redis.expiry import RedisExpiry
from services.catalog.redis.idempotency import RedisIdempotency
from services.catalog.redis.indexes.indexes import RedisIndexes
from services.catalog.redis.indexes.owner_refs import OwnerRefs, OwnerState
from services.catalog.redis.indexes.page_runs import RedisPageRuns
from services.catalog.redis.slot.slot import SessionSlots, require_own_slot

# The number of random tombstones that a deletion or a sweep checks for unfinished work.
_TOMBSTONES_CHECKED = 16


class SessionDeletion:
    """Deletes sessions and finds orphaned pages. Raises UnknownSession, CatalogError."""

    def __init__(
        self,
        redis: CatalogRedis,
        keys: Keys,
        slots: SessionSlots,
        indexes: RedisIndexes,
        expiry: RedisExpiry,
        refs: OwnerRefs,
        runs: RedisPageRuns,
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._slots = slots
        self._indexes = indexes
        self._expiry = expiry
        self._refs = refs
        self._runs = runs

    async def delete(
        self, session_id: str, record: IdempotencyRecord | None
    ) -> list[OrphanedPages]:
        """Delete a session; return its orphaned pages, then those of earlier deletions."""
        if not (await self._slots.exist([session_id]))[0]:
            raise UnknownSession(session_id)
        # Noted first: what is not finished here is found by another deletion.
        await self._note(self._keys.deleted, session_id)
        await self._delete_in_slot(session_id, record)
        with suppress(CatalogError):  # the session is deleted; another deletion cleans up
            return await self._finish(session_id)
        return []

    async def begin_creation(self, session_id: str) -> None:
        """Note that workers write pages of a session before it is committed."""
        name = self._keys.creations
        await self._redis.write(name, "EVAL", scripts.BEGIN_CREATION, 1, name, session_id)

    async def end_creation(self, session_id: str) -> None:
        """Note that a session is committed; a sweep that finds it first does the same."""
        with suppress(CatalogError):
            await self._redis.write(self._keys.creations, "ZREM", self._keys.creations, session_id)

    async def get_orphaned(self) -> list[OrphanedPages]:
        """Return the orphaned pages that are not confirmed as deleted yet.

        A session is noted before it can have some; one without any is removed. A few tombstones are
        checked too, as a deletion that broke off has noted nothing.
        """
        await self._abandon_creations()
        noted = await self._members(self._keys.orphaned, "SMEMBERS")
        orphaned = await self._check([*noted, *await self._sample_deleted()])
        due = {each.session for each in orphaned}
        settled = [owner for owner in noted if owner not in due]
        if settled:
            await self._redis.write(self._keys.orphaned, "SREM", self._keys.orphaned, *settled)
        return orphaned

    async def get_deleted(self) -> list[str]:
        """Return the deleted sessions with a tombstone."""
        return await self._members(self._keys.deleted, "SMEMBERS")

    async def _abandon_creations(self) -> None:
        name = self._keys.creations
        words: Command = ("EVAL", scripts.READ_ABANDONED, 1, name, int(CREATION_SECONDS))
        for found in await self._redis.read(name, *words):
            session_id = found.decode()
            key, call = self._slots.build_call(scripts.ABANDON, session_id)
            if await self._redis.write(key, *call):
                await self._note(self._keys.deleted, session_id)
                await self._note(self._keys.orphaned, session_id)
            await self.end_creation(session_id)

    async def _delete_in_slot(self, session_id: str, record: IdempotencyRecord | None) -> None:
        keys = [*self._keys.get_session_keys(session_id), self._keys.get_claim(session_id)]
        text = ""
        if record is not None:
            require_own_slot(record, session_id)
            keys.append(self._keys.get_record(record.key))
            text = RedisIdempotency.encode(record, created="")
        words: Command = (token_hex(8), RedisIdempotency.MILLISECONDS, text)
        call: Command = ("EVAL", scripts.DELETE_SESSION, len(keys), *keys, *words)
        outcome = await self._redis.write(keys[META], *call)
        if outcome == b"unknown":
            raise UnknownSession(session_id)
        if outcome == b"changed":
            raise CatalogError("the request was answered already; ask for its answer")

    async def _finish(self, session_id: str) -> list[OrphanedPages]:
        """Clean up after a deletion in other slots; return the pages orphaned by then."""
        await self._note(self._keys.orphaned, session_id)
        owners = await self._release_refs(session_id)
        (state,) = await self._refs.read([session_id])
        _, retained = await self._reconcile(session_id, state)
        others = [*owners, *await self._sample_deleted()]
        orphaned = await self._check([owner for owner in others if owner != session_id])
        return [OrphanedPages(session_id, retained), *orphaned]

    async def _release_refs(self, session_id: str) -> list[str]:
        """Remove a deleted session's references and index entries; return the owners."""
        _, flat, names = await self._slots.read(
            session_id, ("HGETALL", TOMBSTONE), ("HKEYS", OWNERS)
        )
        tombstone = mapping.to_hash(flat)
        owners = [name.decode() for name in names]
        if owners:
            await self._note(self._keys.orphaned, *owners)
        for owner in owners:
            await self._refs.set(session_id, owner, 0)
        tenant = tombstone.get("tenant", b"").decode()
        await self._indexes.remove(session_id, tenant)
        await self._expiry.remove(session_id, tenant)
        await self._runs.drop(session_id, tenant)
        name = self._keys.get_session_keys(session_id)[OWNERS]
        await self._redis.write(name, "DEL", name)
        return owners

    async def _check(self, owners: Sequence[str]) -> list[OrphanedPages]:
        """Return the orphaned pages of these owners, after finishing deletions that broke off."""
        unique = list(dict.fromkeys(owners))
        orphaned = []
        for owner, state in zip(unique, await self._refs.read(unique), strict=True):
            due, pages = state.due, state.retained or 0
            if state.exists:
                continue
            if not state.is_settled:
                if state.has_tombstone and state.retained is None:
                    await self._release_refs(owner)
                due, pages = await self._reconcile(owner, state)
            if due:
                orphaned.append(OrphanedPages(owner, pages))
        return orphaned

    async def _reconcile(self, owner: str, state: OwnerState) -> tuple[bool, int]:
        """Return whether the workers may hold orphaned pages, and how many pages are retained."""
        outcome, pages = await self._refs.reconcile(owner, state)
        if outcome == "same" and pages == 0:
            await self._redis.write(self._keys.deleted, "SREM", self._keys.deleted, owner)
        return outcome == "due", pages

    async def _sample_deleted(self) -> list[str]:
        return await self._members(self._keys.deleted, "SRANDMEMBER", _TOMBSTONES_CHECKED)

    async def _members(self, name: str, command: str, *words: int) -> list[str]:
        return [owner.decode() for owner in await self._redis.read(name, command, name, *words)]

    async def _note(self, name: str, *owners: str) -> None:
        await self._redis.write(name, "EVAL", scripts.ADD_MEMBERS, 1, name, *owners)
