"""Tool calls and repairs in the Redis catalog."""

from itertools import takewhile

from kvrecall.domain.errors import CatalogError, UnknownCall, UnknownSession
from kvrecall.domain.tool_calls import PendingCall
from services.cancellation import run_to_completion
from services.catalog.quota import UNLIMITED, TenantLimits
from services.catalog.records import IdempotencyRecord, RepairCommit, RepairRecord
from services.catalog.redis import mapping, scripts
from services.catalog.redis.commits import build_call_report, build_repair
from services.catalog.redis.indexes import RedisIndexes
from services.catalog.redis.keys import CALLS, META, REPAIRS
from services.catalog.redis.slot import ChangedMeanwhile, SessionSlots
from services.catalog.redis.tenant_use import SessionGrowth


class RedisToolCalls:
    """Tool calls and what clients report of them."""

    def __init__(self, slots: SessionSlots, indexes: RedisIndexes, growth: SessionGrowth) -> None:
        self._slots = slots
        self._growth = growth
        self._indexes = indexes

    async def get(self, session_id: str, call_id: str) -> PendingCall:
        """Return the newest call of that id. Raises UnknownCall."""
        reply = await self._slots.run(scripts.READ_CALL, session_id, call_id)
        if reply is None:
            raise UnknownCall(session_id, call_id)
        parts, result, turns = reply
        return mapping.consume_call(mapping.from_call_parts(parts), result, int(turns))

    async def get_pieces(
        self, session_id: str, call: PendingCall, first: int, limit: int
    ) -> tuple[str, ...]:
        """Return pieces of a call's output from `first` on, up to the first missing one."""
        names = mapping.to_piece_names((call.turn, call.position), range(first, first + limit))
        _, pieces = await self._slots.read(session_id, ("HMGET", CALLS, *names))
        return tuple(piece.decode() for piece in takewhile(lambda piece: piece is not None, pieces))

    async def commit(
        self,
        session_id: str,
        call: PendingCall,
        epoch: int,
        record: IdempotencyRecord | None,
        piece: tuple[int, str] | None = None,
        limits: TenantLimits = UNLIMITED,
    ) -> None:
        """Store the reported state of a call. Raises UnknownSession, StaleEpoch, QuotaExceeded."""
        commit = build_call_report(call, await self._indexes.get_time(), piece)
        await run_to_completion(
            self._growth.apply(
                session_id, commit, tokens=None, limits=limits, epoch=epoch, record=record
            )
        )

    async def get_time(self) -> float:
        """Return the time of the clock that events are stored under."""
        return await self._indexes.get_time()

    async def get_idle_sessions(self, since: float) -> list[str]:
        """Return the sessions with a pending call without an event after `since`."""
        return await self._indexes.get_idle_sessions(since)


_MAX_ATTEMPTS = 8


class RedisRepairs:
    """Repairs that were run, and which ones are still due."""

    def __init__(self, slots: SessionSlots, growth: SessionGrowth) -> None:
        self._slots = slots
        self._growth = growth

    async def commit(self, session_id: str, commit: RepairCommit, epoch: int) -> None:
        """Store the result of a repair. Raises UnknownSession, StaleEpoch."""
        await run_to_completion(self._commit(session_id, commit, epoch))

    async def get_latest(self, session_id: str, limit: int) -> list[RepairRecord]:
        """Return up to `limit` retained repairs, newest first. Raises UnknownSession."""
        exists, last, entries = await self._slots.read(
            session_id, ("HGET", META, "repairs"), ("LRANGE", REPAIRS, 0, -1)
        )
        if not exists:
            raise UnknownSession(session_id)
        return mapping.from_repair_entries(entries, int(last))[:limit]

    async def _commit(self, session_id: str, commit: RepairCommit, epoch: int) -> None:
        """Commit the repair to the turn that is the last one then."""
        tokens = None if commit.memory is None else commit.memory.length
        for _ in range(_MAX_ATTEMPTS):
            exists, (turns, calls) = await self._slots.read(
                session_id, ("HMGET", META, "turns", "calls")
            )
            if not exists:
                raise UnknownSession(session_id)
            changes = build_repair(commit, int(turns), int(calls))
            try:
                await self._growth.apply(session_id, changes, tokens=tokens, epoch=epoch)
            except ChangedMeanwhile:
                continue
            return
        raise CatalogError(
            f"session {session_id!r} had turns committed faster than a repair could be; try again"
        )
