"""Repairs in the Redis catalog."""

from kvrecall.domain.errors import CatalogError, UnknownSession
from services.cancellation import run_to_completion
from services.catalog.encryption.encryption import Encryption
from services.catalog.records import RepairCommit, RepairRecord
from services.catalog.redis import mapping
from services.catalog.redis.connection.keys import META, REPAIRS
from services.catalog.redis.indexes.tenant_use import SessionGrowth
from services.catalog.redis.slot.commits import build_repair
from services.catalog.redis.slot.slot import ChangedMeanwhile, SessionSlots

_MAX_ATTEMPTS = 8


class RedisRepairs:
    """Repairs that were run, and which ones are still due."""

    def __init__(self, slots: SessionSlots, growth: SessionGrowth, encryption: Encryption) -> None:
        self._ciphers = encryption.sessions
        self._slots = slots
        self._growth = growth

    async def commit(self, session_id: str, commit: RepairCommit, epoch: int) -> None:
        """Store the result of a repair. Raises UnknownSession, StaleEpoch."""
        await run_to_completion(self._commit(session_id, commit, epoch))

    async def get_latest(self, session_id: str, limit: int) -> list[RepairRecord]:
        """Return up to `limit` retained repairs, newest first. Raises UnknownSession."""
        cipher = await self._ciphers.to_read(session_id)
        exists, last, entries = await self._slots.read(
            session_id, ("HGET", META, "repairs"), ("LRANGE", REPAIRS, 0, -1)
        )
        if not exists:
            raise UnknownSession(session_id)
        return mapping.from_repair_entries(entries, int(last), cipher)[:limit]

    async def _commit(self, session_id: str, commit: RepairCommit, epoch: int) -> None:
        """Commit the repair to the turn that is the last one then."""
        tokens = None if commit.memory is None else commit.memory.length
        cipher = await self._ciphers.to_write(session_id)
        for _ in range(_MAX_ATTEMPTS):
            exists, (turns, calls) = await self._slots.read(
                session_id, ("HMGET", META, "turns", "calls")
            )
            if not exists:
                raise UnknownSession(session_id)
            changes = build_repair(session_id, commit, int(turns), int(calls), cipher)
            try:
                await self._growth.apply(session_id, changes, tokens=tokens, epoch=epoch)
            except ChangedMeanwhile:
                continue
            return
        raise CatalogError(
            f"session {session_id!r} had turns committed faster than a repair could be; try again"
        )
