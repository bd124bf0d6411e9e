"""Claims and epochs of sessions in the Redis catalog.

Claims are not waited for on replicas: one that a failover loses costs a turn that starts in vain, as
the epoch decides who may write.
"""

from kvrecall.domain.errors import UnknownSession
from services.cancellation import run_to_completion
from services.catalog.claims import build_session_busy
from services.catalog.records import (
    Lease,
)
from services.catalog.redis import scripts
from services.catalog.redis.connection.client import CatalogRedis
from services.catalog.redis.connection.keys import (
    Keys,
)
from services.catalog.redis.slot.commits import (
    build_take_over,
)
from services.catalog.redis.slot.slot import SessionSlots


class RedisLeases:
    """Claims that expire by the server's clock, epochs in the session."""

    def __init__(self, redis: CatalogRedis, keys: Keys, slots: SessionSlots) -> None:
        self._redis = redis
        self._keys = keys
        self._slots = slots

    async def claim(self, session_id: str, holder: str, seconds: float) -> Lease:
        """Claim the session, or extend the holder's claim. Raises SessionBusy, UnknownSession."""
        meta = self._keys.get_meta(session_id)
        claim = self._keys.get_claim(session_id)
        milliseconds = max(1, round(1000 * seconds))
        call = ("EVAL", scripts.CLAIM, 2, meta, claim, holder, milliseconds)
        outcome, *details = await self._redis.read(meta, *call)
        if outcome == b"unknown":
            raise UnknownSession(session_id)
        if outcome == b"busy":
            raise build_session_busy(session_id, details[0].decode())
        return Lease(int(details[0]), details[1].decode())

    async def release(self, session_id: str, holder: str) -> None:
        """Release the holder's claim."""
        claim = self._keys.get_claim(session_id)
        await self._redis.read(claim, "EVAL", scripts.DELETE_IF_EQUAL, 1, claim, holder)

    async def take_over(self, session_id: str, worker: str) -> int:
        """Start a new epoch and return it. Raises UnknownSession."""
        commit = build_take_over(worker)
        applied = await run_to_completion(self._slots.apply(session_id, commit))
        return applied.epoch
