"""Sessions and their turns in the SQLite catalog. Each function runs within a transaction of its caller."""

import sqlite3
import time

import aiosqlite

from kvrecall.domain.errors import UnknownCall, UnknownSession
from kvrecall.domain.reports import MemoryReport
from kvrecall.domain.session import Session, Turn
from kvrecall.domain.tool_calls import PendingCall
from services.catalog.base import RepairCommit, SessionPage, TurnCommit
from services.catalog.serialization import MEMORY, cursor_text, cursor_value, token_values
from services.catalog.sqlite import episodes
from services.catalog.sqlite import mapping as rows
from services.catalog.sqlite import page_refs as sharing
from services.catalog.sqlite import tool_calls as pauses
from services.catalog.sqlite.statements import check_session, every, fence, one


async def add(db: aiosqlite.Connection, session: Session, worker_state: bytes) -> None:
    """A new session."""
    await db.execute(
        "INSERT INTO sessions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", rows.session_row(session)
    )
    await db.execute("INSERT INTO worker_states VALUES (?, ?)", (session.id, worker_state))
    await sharing.replace_shares(db, session.id, session.shared)


async def read(db: aiosqlite.Connection, session: str) -> Session:
    """The session. Raises UnknownSession."""
    row = await one(db, "SELECT * FROM sessions WHERE id = ?", (session,))
    if row is None:
        raise UnknownSession(session)
    return await _session(db, row)


async def read_state(db: aiosqlite.Connection, session: str) -> bytes:
    """The worker's state. Raises UnknownSession."""
    row = await one(db, "SELECT state FROM worker_states WHERE session = ?", (session,))
    if row is None:
        raise UnknownSession(session)
    return bytes(row["state"])


async def read_page(
    db: aiosqlite.Connection, limit: int, cursor: str | None, tenant: str
) -> SessionPage:
    """Some sessions of a tenant, newest first. Raises InvalidRequest."""
    where = ""
    bounds = tuple[object, ...]()
    if cursor is not None:
        where = "AND (created_at, id) < (?, ?)"
        bounds = cursor_value(cursor)
    query = (
        f"SELECT * FROM sessions WHERE tenant = ? {where} ORDER BY created_at DESC, id DESC LIMIT ?"
    )
    found = await every(db, query, (tenant, *bounds, limit + 1))
    sessions = tuple([await _session(db, row) for row in found[:limit]])
    return SessionPage(sessions, cursor_text(sessions[-1]) if len(found) > limit else None)


async def read_ids(db: aiosqlite.Connection) -> list[str]:
    """Every session there is, the oldest first."""
    return [
        row["id"] for row in await every(db, "SELECT id FROM sessions ORDER BY created_at, id", ())
    ]


async def read_turns(db: aiosqlite.Connection, session: str, after: int, limit: int) -> list[Turn]:
    """Up to `limit` turns with numbers over `after`."""
    query = "SELECT * FROM turns WHERE session = ? AND number > ? ORDER BY number LIMIT ?"
    return [rows.turn_value(row) for row in await every(db, query, (session, after, limit))]


async def read_tokens(db: aiosqlite.Connection, session: str) -> tuple[int, ...]:
    """Every token of every turn. Raises UnknownSession."""
    await check_session(db, session)
    found = await every(
        db, "SELECT token_ids FROM turns WHERE session = ? ORDER BY number", (session,)
    )
    return token_values(b"".join(row["token_ids"] for row in found))


async def read_call(db: aiosqlite.Connection, session: str, call: str) -> PendingCall:
    """The newest call of that id. Raises UnknownCall."""
    query = "SELECT * FROM calls WHERE session = ? AND id = ? ORDER BY turn DESC, position LIMIT 1"
    row = await one(db, query, (session, call))
    if row is None:
        raise UnknownCall(session, call)
    return rows.call_value(row)


async def read_length(db: aiosqlite.Connection, tenant: str) -> int:
    """Tokens of a tenant's sessions together."""
    row = await one(
        db, "SELECT coalesce(sum(length), 0) AS tokens FROM sessions WHERE tenant = ?", (tenant,)
    )
    assert row is not None, "an aggregate has one row"
    return int(row["tokens"])


async def take_over(db: aiosqlite.Connection, session: str, worker: str) -> int:
    """A new epoch. Raises UnknownSession."""
    query = "UPDATE sessions SET epoch = epoch + 1, worker = ? WHERE id = ? RETURNING epoch"
    row = await one(db, query, (worker, session))
    if row is None:
        raise UnknownSession(session)
    return int(row["epoch"])


async def add_turn(db: aiosqlite.Connection, commit: TurnCommit, epoch: int) -> None:
    """Everything that a turn changes. Raises UnknownSession, StaleEpoch."""
    turn = commit.turn
    outcome = commit.turn.outcome
    await fence(db, turn.session, epoch)
    await db.execute("INSERT INTO turns VALUES (?, ?, ?, ?, ?, ?)", rows.turn_row(turn))
    await db.execute(
        "UPDATE sessions SET turns = ?, updated_at = ?, output_due = ? WHERE id = ?",
        (turn.number, time.time(), 0 if commit.calls else outcome.output_tokens, turn.session),
    )
    await _replace_memory(db, turn.session, outcome.memory)
    await _replace_state(db, turn.session, commit.worker_state)
    await episodes.count_match(db, turn.session, commit.matched, commit.active)
    await pauses.end_pause(db, commit)
    await pauses.begin_pause(db, turn, commit.calls)
    if outcome.own_repair is not None:
        await pauses.add_repair(db, turn.session, turn.number, outcome.own_repair, commit.repaired)
    if commit.shared is not None:
        await sharing.replace_shares(db, turn.session, commit.shared)
    if commit.prefix is not None:
        await sharing.add_prefix(db, commit.digest, commit.prefix)


async def add_repair(
    db: aiosqlite.Connection, session: str, commit: RepairCommit, epoch: int
) -> None:
    """What a repair changed. Raises UnknownSession, StaleEpoch."""
    await fence(db, session, epoch)
    await pauses.mark_repaired(db, session, commit)
    if commit.worker_state is not None:
        await _replace_state(db, session, commit.worker_state)
    if commit.memory is not None:
        await _replace_memory(db, session, commit.memory)
    if commit.report is not None:
        turns = await one(db, "SELECT turns FROM sessions WHERE id = ?", (session,))
        assert turns is not None, "the fence has found the session"
        await pauses.add_repair(db, session, turns["turns"] + 1, commit.report, commit.details)


async def _session(db: aiosqlite.Connection, row: sqlite3.Row) -> Session:
    calls = await every(
        db,
        "SELECT * FROM calls WHERE session = ? AND said IS NULL ORDER BY turn, position",
        (row["id"],),
    )
    repairs = await pauses.reports_since(db, row["id"], row["turns"])
    shared = await sharing.read_shares(db, row["id"])
    return rows.session_value(row, tuple(rows.call_value(call) for call in calls), repairs, shared)


async def _replace_state(db: aiosqlite.Connection, session: str, state: bytes) -> None:
    await db.execute("UPDATE worker_states SET state = ? WHERE session = ?", (state, session))


async def _replace_memory(db: aiosqlite.Connection, session: str, memory: MemoryReport) -> None:
    values = (MEMORY.dump_json(memory).decode(), memory.length, session)
    await db.execute("UPDATE sessions SET memory = ?, length = ? WHERE id = ?", values)
