"""Sessions in the Redis catalog: new ones, forks and sessions from elsewhere.

A fork is read in its parent's slot and written in its own.
"""

from contextlib import suppress
from dataclasses import replace
from typing import Any

from kvrecall.domain.errors import CatalogError, QuotaExceeded, UnknownSession, UnknownTurn
from kvrecall.domain.sessions.session import Session
from kvrecall.domain.sessions.state_machine import SessionState
from kvrecall.domain.tool_calls import PendingCall
from services.cancellation import run_to_completion
from services.catalog.encryption.cipher import Cipher
from services.catalog.encryption.encryption import Encryption
from services.catalog.owners import Owners
from services.catalog.quota import UNLIMITED, TenantLimits, TenantUse
from services.catalog.records import (
    BuildCommit,
    EpisodeSet,
    ForkCommit,
    IdempotencyRecord,
    SegmentsCommit,
    SessionDump,
    SessionPage,
)
from services.catalog.redis import mapping, scripts
from services.catalog.redis.connection.keys import (
    CALLS,
    EPISODE_SET,
    META,
    REPAIRS,
    TOKENS,
    TURNS,
)
from services.catalog.redis.deletion import SessionDeletion
from services.catalog.redis.expiry import RedisExpiry
from services.catalog.redis.idempotency import RedisIdempotency
from services.catalog.redis.indexes.indexes import RedisIndexes
from services.catalog.redis.indexes.page_tree import RedisPageTree
from services.catalog.redis.indexes.tenant_use import RedisTenantUse, SessionGrowth
from services.catalog.redis.memories import RedisMemories
from services.catalog.redis.slot.commits import (
    RedisCommit,
    build_create,
    build_episodes,
    build_segments,
)
from services.catalog.redis.slot.slot import NEW, SessionSlots, build_incomplete


class RedisSessions:
    """Sessions, from their creation to their deletion."""

    def __init__(
        self,
        slots: SessionSlots,
        indexes: RedisIndexes,
        expiry: RedisExpiry,
        memories: RedisMemories,
        idempotency: RedisIdempotency,
        deletion: SessionDeletion,
        use: RedisTenantUse,
        growth: SessionGrowth,
        tree: RedisPageTree,
        encryption: Encryption,
        owners: Owners,
    ) -> None:
        self._slots = slots
        self._indexes = indexes
        self._expiry = expiry
        self._memories = memories
        self._idempotency = idempotency
        self._deletion = deletion
        self._use = use
        self._growth = growth
        self._tree = tree
        self._encryption = encryption
        self._owners = owners

    async def create(
        self,
        session: Session,
        worker_state: bytes,
        record: IdempotencyRecord | None,
        limits: TenantLimits = UNLIMITED,
    ) -> None:
        """Add a session. Raises QuotaExceeded."""
        cipher = await self._encryption.tenants.to_write(session.settings.tenant)
        commit = build_create(session, worker_state, cipher)
        await run_to_completion(self._add(session, commit, record, limits))

    async def get(self, session_id: str, tenant: str | None = None) -> Session:
        """Return the session as last committed, if it is the tenant's. Raises UnknownSession."""
        return await self._slots.get(session_id, tenant)

    async def get_worker_state(self, session_id: str) -> bytes:
        """Return the serialized pb.SessionState. Raises UnknownSession."""
        cipher = await self._encryption.sessions.to_read(session_id)
        exists, state = await self._slots.read(session_id, ("HGET", META, "state"))
        if not exists:
            raise UnknownSession(session_id)
        return mapping.open_state(session_id, state, cipher)

    async def get_page_ids(self, session_id: str) -> bytes:
        """Return the ids of the session's pages, joined. Raises UnknownSession."""
        exists, page_ids = await self._slots.read(session_id, ("HGET", META, "page_ids"))
        if not exists:
            raise UnknownSession(session_id)
        return bytes(page_ids)

    async def get_page(self, limit: int, cursor: str | None, tenant: str = "") -> SessionPage:
        """Return up to `limit` sessions of a tenant, newest first. Raises InvalidRequest."""
        return await self._indexes.get_page(limit, cursor, tenant)

    async def get_ids(self) -> list[str]:
        """Return the ids of all sessions, oldest first."""
        return await self._indexes.get_ids()

    async def get_use(self, tenant: str) -> TenantUse:
        """Return what the tenant has, with writes that have begun."""
        return await self._use.get(tenant)

    async def count(self, tenant: str) -> int:
        """Return the number of the tenant's sessions."""
        return await self._indexes.count(tenant)

    async def count_by_state(self) -> dict[SessionState, int]:
        """Count the idle and the paused sessions of all tenants, roughly."""
        return await self._indexes.count_by_state()

    async def fork(
        self,
        commit: ForkCommit,
        record: IdempotencyRecord | None,
        limits: TenantLimits = UNLIMITED,
    ) -> None:
        """Add a session that starts from another. Raises UnknownSession, UnknownTurn, QuotaExceeded."""
        await run_to_completion(self._fork(commit, record, limits))

    async def restore(self, dump: SessionDump) -> None:
        """Add a session from another catalog. Raises CatalogError when its id is taken."""
        await run_to_completion(self._restore(dump))

    async def delete(self, session_id: str, record: IdempotencyRecord | None) -> None:
        """Delete the session; its pages may be dead then. Raises UnknownSession."""
        await run_to_completion(self._delete(session_id, record))
        self._owners.forget(session_id)

    async def _delete(self, session_id: str, record: IdempotencyRecord | None) -> None:
        (session,) = await self._slots.get_each([session_id])
        await self._deletion.delete(session_id, record)
        if session is not None:
            await self._memories.remove(session)

    async def _fork(
        self, commit: ForkCommit, record: IdempotencyRecord | None, limits: TenantLimits
    ) -> None:
        child = commit.session
        now = await self._indexes.get_time()
        cipher = await self._encryption.tenants.to_write(child.settings.tenant)
        changes = await _build_fork(self._slots, commit, now, cipher)
        async with self._tree.proposed(child.id, commit.page_ids):
            await self._add(child, changes, record, limits)

    async def _restore(self, dump: SessionDump) -> None:
        cipher = await self._encryption.tenants.to_write(dump.session.settings.tenant)
        async with self._tree.proposed(dump.session.id, dump.page_ids):
            await self._add(dump.session, _build_restore(dump, cipher), None, UNLIMITED)

    async def _add(
        self,
        session: Session,
        commit: RedisCommit,
        record: IdempotencyRecord | None,
        limits: TenantLimits,
    ) -> None:
        """Add a session: list it first, then commit it, then list it again if that took long."""
        record = await self._idempotency.seal(record)
        async with self._idempotency.reserved(record, session.id):
            await self._indexes.add(session, last_event_at=commit.at, limit=limits.sessions)
            await self._expiry.add(session)
            await self._memories.add(session)
            try:
                await self._growth.apply(
                    session.id,
                    commit,
                    tokens=session.memory.length or None,
                    limits=limits,
                    tenant=session.settings.tenant,
                    epoch=NEW,
                )
            except QuotaExceeded:
                await self._indexes.remove(session.id, session.settings.tenant)
                await self._expiry.remove(session.id, session.settings.tenant)
                await self._memories.remove(session)
                raise
        with suppress(CatalogError):
            await self._indexes.add(session, last_event_at=0.0)


async def _build_fork(
    slots: SessionSlots, fork: ForkCommit, at: float, cipher: Cipher
) -> RedisCommit:
    """Build the commit of the child. Raises UnknownSession, UnknownTurn, CatalogError.

    Calls that it waits for again were made at time `at`.
    """
    snapshot = await slots.run(scripts.READ_SNAPSHOT, fork.parent, fork.turns)
    if snapshot == b"unknown":
        raise UnknownSession(fork.parent)
    if snapshot == b"turn":
        raise UnknownTurn(fork.parent, fork.turns)
    if snapshot == b"incomplete":
        raise build_incomplete(fork.parent)
    (_, open_calls, recent, repairs), log, tokens, calls, latest = snapshot
    commit = build_create(fork.session, fork.worker_state, cipher, fork.page_ids)
    commit.push(TURNS, log).push(TOKENS, tokens)
    fields = mapping.to_hash(calls)
    if not latest:
        pause = _build_pause(fields, fork.turns, at, cipher)
        commit.put(CALLS, mapping.copy_calls(fields, fork.turns, pause, cipher))
        return commit.put(META, {"calls": len(pause)})
    commit.put(CALLS, mapping.copy_calls(fields, fork.turns, None, cipher))
    commit.put(META, {"calls": open_calls, "recent": recent, "repairs": repairs})
    return _put_latest(commit, latest)


def _build_restore(dump: SessionDump, cipher: Cipher) -> RedisCommit:
    """Build the commit of a session from another catalog."""
    session = dump.session
    commit = build_create(session, dump.worker_state, cipher, dump.page_ids)
    entries = [mapping.to_turn_entries(turn, cipher) for turn in dump.turns]
    commit.push(TURNS, [entry for entry, _ in entries])
    commit.push(TOKENS, [tokens for _, tokens in entries])
    for call in sorted(dump.calls, key=lambda call: (call.turn, -call.position)):
        commit.put(CALLS, mapping.to_restored_call_fields(call, cipher))
    for position, pieces in dump.pieces.items():
        commit.put(CALLS, mapping.to_piece_fields(position, pieces, cipher))
    commit.push(REPAIRS, [mapping.to_repair_entry(record, cipher) for record in dump.repairs])
    counts = {
        "calls": sum(call.turn == session.turns for call in dump.calls),
        "recent": sum(record.turn > session.turns for record in dump.repairs),
        "repairs": max((record.number for record in dump.repairs), default=0),
    }
    commit.put(META, counts)
    if dump.episodes != EpisodeSet():
        _add_episodes(commit, dump, cipher)
    return commit


def _build_pause(
    fields: dict[str, bytes], turn: int, at: float, cipher: Cipher
) -> list[PendingCall]:
    """Build the calls that a turn ended on, as they were made."""
    return [
        PendingCall(turn, call.position, call.call, last_event_at=at)
        for call in mapping.get_calls_of_turn(fields, turn, cipher)
    ]


def _put_latest(commit: RedisCommit, latest: list[Any]) -> RedisCommit:
    """Put repairs, and the five hashes of episodes, whose keys follow one another."""
    repairs, *hashes = latest
    commit.push(REPAIRS, repairs)
    for index, flat in enumerate(hashes, EPISODE_SET):
        commit.put(index, mapping.to_hash(flat))
    return commit


def _add_episodes(commit: RedisCommit, dump: SessionDump, cipher: Cipher) -> None:
    without_episodes = replace(dump.episodes, episodes=())
    added = build_segments(SegmentsCommit(dump.segments, without_episodes), cipher)
    labels = tuple(segment.label for segment in dump.segments)
    built = build_episodes(BuildCommit(dump.episodes, dump.built, labels), cipher)
    commit.commands += added.commands + built.commands
    commit.put(EPISODE_SET, {"active": dump.episodes.active})
