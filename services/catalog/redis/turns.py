"""Turns in the Redis catalog."""

import asyncio
import time
from collections.abc import Awaitable

from kvrecall.domain.errors import CatalogError, UnknownSession
from kvrecall.domain.sessions.session import Turn
from services.cancellation import run_to_completion
from services.catalog.encryption.encryption import Encryption
from services.catalog.quota import UNLIMITED, TenantLimits
from services.catalog.records import HistoryEntry, IdempotencyRecord, SettleCommit, TurnCommit
from services.catalog.redis import mapping
from services.catalog.redis.connection.keys import META, STATES, TOKENS, TURNS
from services.catalog.redis.expiry import RedisExpiry
from services.catalog.redis.histories import RedisHistories
from services.catalog.redis.idempotency import RedisIdempotency
from services.catalog.redis.indexes.indexes import RedisIndexes
from services.catalog.redis.indexes.page_tree import RedisPageTree
from services.catalog.redis.indexes.tenant_use import SessionGrowth
from services.catalog.redis.slot.commits import build_settled, build_turn
from services.catalog.redis.slot.slot import SessionSlots, build_incomplete
from services.catalog.serialization import decode_tokens, unpack


class RedisTurns:
    """The turn log of each session."""

    def __init__(
        self,
        slots: SessionSlots,
        indexes: RedisIndexes,
        histories: RedisHistories,
        expiry: RedisExpiry,
        growth: SessionGrowth,
        tree: RedisPageTree,
        encryption: Encryption,
        idempotency: RedisIdempotency,
    ) -> None:
        self._slots = slots
        self._indexes = indexes
        self._histories = histories
        self._expiry = expiry
        self._growth = growth
        self._tree = tree
        self._ciphers = encryption.sessions
        self._idempotency = idempotency

    async def commit(
        self,
        commit: TurnCommit,
        epoch: int,
        record: IdempotencyRecord | None,
        limits: TenantLimits = UNLIMITED,
    ) -> None:
        """Append a turn with everything it changes. Raises UnknownSession, StaleEpoch, QuotaExceeded."""
        await run_to_completion(self._commit(commit, epoch, record, limits))

    async def commit_settled(self, session_id: str, commit: SettleCommit, epoch: int) -> None:
        """Replace the worker state and the memory report. Raises UnknownSession, StaleEpoch."""
        await run_to_completion(self._commit_settled(session_id, commit, epoch))

    async def get_after(self, session_id: str, number: int, limit: int) -> list[Turn]:
        """Return up to `limit` turns that follow turn `number`, in order."""
        if limit < 1:
            return []
        first = max(0, number)
        span = (first, first + limit - 1)
        cipher = await self._ciphers.to_read(session_id)
        _, entries, tokens = await self._slots.read(
            session_id, ("LRANGE", TURNS, *span), ("LRANGE", TOKENS, *span)
        )
        return mapping.from_turn_entries(session_id, entries, tokens, first + 1, cipher)

    async def get_state(self, session_id: str, number: int) -> bytes | None:
        """Return the serialized pb.SessionState at the end of turn `number`, if it was kept."""
        cipher = await self._ciphers.to_read(session_id)
        _, kept = await self._slots.read(session_id, ("HGET", STATES, str(number)))
        if kept is None:
            return None
        try:
            return unpack(mapping.open_kept(session_id, number, kept, cipher))
        except ValueError as error:
            raise CatalogError(f"session {session_id}: {error}") from error

    async def get_token_ids(self, session_id: str) -> tuple[int, ...]:
        """Return all tokens that the session's turns appended. Raises UnknownSession."""
        cipher = await self._ciphers.to_read(session_id)
        exists, turns, tokens = await self._slots.read(
            session_id, ("HGET", META, "turns"), ("LRANGE", TOKENS, 0, -1)
        )
        if not exists:
            raise UnknownSession(session_id)
        if len(tokens) != int(turns):
            raise build_incomplete(session_id)
        return decode_tokens(b"".join(mapping.open_tokens(tokens, cipher)))

    async def _commit_settled(self, session_id: str, commit: SettleCommit, epoch: int) -> None:
        cipher = await self._ciphers.to_write(session_id)
        changes = build_settled(session_id, commit, cipher)
        tokens = commit.memory.length
        async with self._tree.proposed(session_id, commit.page_ids) as proposal:
            await self._growth.apply(session_id, changes, tokens=tokens, epoch=epoch)
        await self._tree.settle(session_id, proposal)

    async def _commit(
        self,
        commit: TurnCommit,
        epoch: int,
        record: IdempotencyRecord | None,
        limits: TenantLimits,
    ) -> None:
        turn = commit.turn
        at = await self._indexes.get_time() if commit.calls else time.time()
        cipher = await self._ciphers.to_write(turn.session)
        changes = build_turn(commit, at, cipher)
        record = await self._idempotency.seal(record)
        if commit.calls:
            await self._indexes.add_pause(turn.session, turn.number, changes.at)
        tokens = turn.outcome.memory.length
        async with self._tree.proposed(turn.session, commit.page_ids) as proposal:
            applied = await self._growth.apply(
                turn.session, changes, tokens=tokens, limits=limits, epoch=epoch, record=record
            )
        # The commit stands from here on, whatever becomes of the indexes.
        followups: list[Awaitable[object]] = [self._tree.settle(turn.session, proposal)]
        if commit.history:
            entry = HistoryEntry(commit.history, turn.session, turn.number)
            followups.append(self._histories.add(entry))
        if commit.lifetime is not None:
            followups.append(self._expiry.set(turn.session, applied.tenant, commit.lifetime))
        await asyncio.gather(*followups)
