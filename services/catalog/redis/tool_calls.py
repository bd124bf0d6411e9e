"""Tool calls in the Redis catalog."""

from itertools import takewhile

from kvrecall.domain.errors import UnknownCall
from kvrecall.domain.tool_calls import PendingCall
from services.cancellation import run_to_completion
from services.catalog.quota import UNLIMITED, TenantLimits
from services.catalog.records import IdempotencyRecord
from services.catalog.redis import mapping, scripts
from services.catalog.redis.connection.keys import CALLS
from services.catalog.redis.indexes.indexes import RedisIndexes
from services.catalog.redis.indexes.tenant_use import SessionGrowth
from services.catalog.redis.slot.commits import build_call_report
from services.catalog.redis.slot.slot import SessionSlots


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
