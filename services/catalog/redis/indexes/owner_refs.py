"""The references to one owner's pages, in the owner's slot."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvrecall.domain.sessions.session import SharedPages
from services.catalog.redis import scripts
from services.catalog.redis.connection.client import CatalogRedis
from services.catalog.redis.connection.shared import Argument
from services.catalog.redis.slot.slot import SessionSlots

# A reference of a session that does not exist has ended once it is older.
GRACE_SECONDS = 3600
# The number of unverified references that a reconciliation compares with their sessions.
_VERIFIED_AT_ONCE = 64


@dataclass(frozen=True)
class OwnerState:
    """The reply of READ_REFS.

    `retained` is the number of pages retained at the last reconciliation (None: there was none),
    `due` whether the workers may hold more, `used` the number of pages that are referenced.
    `unverified` are some references that are old and whose sessions may not exist, each with the
    time it was made.
    """

    exists: bool
    has_tombstone: bool
    retained: int | None
    due: bool
    used: int
    unverified: Sequence[tuple[str, bytes]]

    @property
    def is_settled(self) -> bool:
        """True if a reconciliation would find nothing to change."""
        return (
            self.has_tombstone
            and not self.unverified
            and self.retained is not None
            and 0 < self.retained <= self.used
        )


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
        words = (GRACE_SECONDS, _VERIFIED_AT_ONCE)
        calls = [self._slots.build_call(scripts.READ_REFS, owner, *words) for owner in owners]
        return [_to_state(reply) for reply in await self._redis.read_each(calls)]

    async def reconcile(self, owner: str, state: OwnerState) -> tuple[str, int]:
        """Bring a deleted owner's tombstone up to date; return an outcome and a number of pages.

        `due`: the workers may hold more than that many pages. `same`: they do not. `exists`: the
        owner is not deleted.
        """
        exist = await self._slots.exist([session for session, _ in state.unverified])
        words: list[Argument] = []
        for (session, since), exists in zip(state.unverified, exist, strict=True):
            words += [session, since, int(exists)]
        key, call = self._slots.build_call(scripts.RECONCILE_ORPHANED, owner, *words)
        outcome, *pages = await self._redis.write(key, *call)
        return outcome.decode(), int(pages[0]) if pages else 0


def _to_state(reply: Sequence[Any]) -> OwnerState:
    exists, has_tombstone, retained, due, used, unverified = reply
    sessions = [session.decode() for session in unverified[::2]]
    return OwnerState(
        exists=bool(exists),
        has_tombstone=bool(has_tombstone),
        retained=None if retained is None else int(retained),
        due=due is not None,
        used=int(used),
        unverified=tuple(zip(sessions, unverified[1::2], strict=True)),
    )
