"""Tool calls in the Redis catalog."""

from itertools import takewhile

from kvrecall.domain.errors import UnknownCall
from kvrecall.domain.tool_calls import PendingCall
from services.cancellation import run_to_completion
from services.catalog.encryption.encryption import Encryption
from services.catalog.quota import UNLIMITED, TenantLimits
from services.catalog.records import IdempotencyRecord
from services.catalog.redis import mapping, scripts
from services.catalog.redis.connection.keys import CALLS
from services.catalog.redis.idempotency import RedisIdempotency
from services.catalog.redis.indexes.indexes import RedisIndexes
from services.catalog.redis.indexes.tenant_use import SessionGrowth
from services.catalog.redis.slot.commits import build_call_report
from services.catalog.redis.slot.slot import SessionSlots


class RedisToolCalls:
    """Tool calls and what clients report of them."""

    def __init__(
        self,
        slots: SessionSlots,
        indexes: RedisIndexes,
        growth: SessionGrowth,
        encryption: Encryption,
        idempotency: RedisIdempotency,
    ) -> None:
        self._slots = slots
        self._ciphers = encryption.sessions
        self._idempotency = idempotency
        self._growth = growth
        self._indexes = indexes

    async def get(self, session_id: str, call_id: str) -> PendingCall:
        """Return the newest call of that id. Raises UnknownCall."""
        cipher = await self._ciphers.to_read(session_id)
        reply = await self._slots.run(scripts.READ_CALL, session_id, call_id)
        if reply is None:
            raise UnknownCall(session_id, call_id)
        parts, result, turns = reply
        at, *parts = parts
        turn, position = map(int, at.split(b":"))
        call = mapping.from_call_parts(parts, (turn, position), cipher)
        return mapping.consume_call(call, result, int(turns), cipher)

    async def get_pieces(
        self, session_id: str, call: PendingCall, first: int, limit: int
    ) -> tuple[str, ...]:
        """Return pieces of a call's output from `first` on, up to the first missing one."""
        names = mapping.to_piece_names((call.turn, call.position), range(first, first + limit))
        cipher = await self._ciphers.to_read(session_id)
        _, pieces = await self._slots.read(session_id, ("HMGET", CALLS, *names))
        found = takewhile(lambda piece: piece is not None, pieces)
        return tuple(
            mapping.open_of_calls(name, piece, cipher)
            for name, piece in zip(names, found, strict=False)
        )

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
        cipher = await self._ciphers.to_write(session_id)
        record = await self._idempotency.seal(record)
        commit = build_call_report(call, await self._indexes.get_time(), cipher, piece)
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
