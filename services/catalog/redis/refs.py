"""The references to one owner's pages, in the owner's slot."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvrecall.domain.session import SharedPages
from services.catalog.redis import mapping, scripts
from services.catalog.redis.client import CatalogRedis
from services.catalog.redis.slot import SessionSlots

# A reference of a session that does not exist is ignored once it is older.
GRACE_SECONDS = 3600


@dataclass(frozen=True)
class OwnerState:
    """The reply of READ_REFS.

    `retained` is the number of pages retained at the last reconciliation (None: there was none),
    `now` the server's Unix seconds, `entries` the references as a flat hash.
    """

    exists: bool
    has_tombstone: bool
    retained: int | None
    now: int
    entries: Sequence[bytes]


class OwnerRefs:
    """Reads and changes references. Raises CatalogError."""

    def __init__(self, redis: CatalogRedis, slots: SessionSlots) -> None:
        self._redis = redis
        self._slots = slots

    async def add(self, session_id: str, shared: SharedPages) -> int | None:
        """Reference an owner's first pages; None if they are gone.

        Returns the owner's server's Unix seconds.
        """
        script = scripts.ADD_REF
        key, call = self._slots.build_call(script, shared.owner, session_id, shared.pages)
        since = await self._redis.write(key, *call)
        return None if since is None else int(since)

    async def set(self, session_id: str, owner: str, pages: int) -> None:
        """Change the number of pages that an existing reference covers; 0 removes it."""
        key, call = self._slots.build_call(scripts.SET_REF, owner, session_id, pages)
        await self._redis.write(key, *call)

    async def read(self, owners: Sequence[str]) -> list[OwnerState]:
        """Read the references to the pages of each owner."""
        calls = [self._slots.build_call(scripts.READ_REFS, owner) for owner in owners]
        return [_to_state(reply) for reply in await self._redis.read_each(calls)]

    async def count_used(self, state: OwnerState) -> int:
        """Return how many pages are referenced by sessions that exist or may yet be created."""
        refs, ended = await self._split(state)
        return max((ref.pages for ref in refs if ref not in ended), default=0)

    async def reconcile(self, owner: str) -> tuple[str, int]:
        """Bring a deleted owner's tombstone up to date; return an outcome and a number of pages.

        `due`: the workers may hold more than that many pages. `same`: they do not. `exists`: the
        owner is not deleted.
        """
        (state,) = await self.read([owner])
        _, ended = await self._split(state)
        words = [word for ref in ended for word in (ref.session, ref.entry)]
        key, call = self._slots.build_call(scripts.RECONCILE_ORPHANED, owner, *words)
        outcome, *pages = await self._redis.write(key, *call)
        return outcome.decode(), int(pages[0]) if pages else 0

    async def _split(
        self, state: OwnerState
    ) -> tuple[list[mapping.PageRef], list[mapping.PageRef]]:
        """Return all references, and those of them that have ended."""
        entries = mapping.to_hash(state.entries)
        refs = [mapping.PageRef(session_id, entry) for session_id, entry in entries.items()]
        exist = await self._slots.exist([ref.session for ref in refs])
        ended = [
            ref
            for ref, exists in zip(refs, exist, strict=True)
            if not exists and state.now - ref.since > GRACE_SECONDS
        ]
        return refs, ended


def _to_state(reply: Sequence[Any]) -> OwnerState:
    exists, has_tombstone, retained, now, entries = reply
    return OwnerState(
        exists=bool(exists),
        has_tombstone=bool(has_tombstone),
        retained=None if retained is None else int(retained),
        now=int(now),
        entries=entries,
    )
