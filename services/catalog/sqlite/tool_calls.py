"""Tool calls and repairs in the SQLite catalog. Each function runs within a transaction of its caller."""

import time
from collections.abc import Iterable

import aiosqlite

from kvrecall.domain.messages import ToolCall
from kvrecall.domain.reports import RepairReport
from kvrecall.domain.session import Turn
from kvrecall.domain.session_settings import RepairTrigger
from kvrecall.domain.tool_calls import CallStatus, PendingCall
from services.catalog.base import (
    REPAIRS_KEPT,
    RepairCommit,
    RepairDetails,
    RepairRecord,
    TurnCommit,
)
from services.catalog.serialization import REPAIR
from services.catalog.sqlite import mapping as rows
from services.catalog.sqlite.statements import every, one


async def end_pause(db: aiosqlite.Connection, commit: TurnCommit) -> None:
    """A turn said the results of all calls that waited for one."""
    turn = commit.turn
    for call, result in commit.inline_results.items():
        await db.execute(
            "UPDATE calls SET status = ?, result = ? WHERE session = ? AND id = ? AND said IS NULL",
            (CallStatus.COMPLETED.value, result, turn.session, call),
        )
    await db.execute(
        "UPDATE calls SET said = ? WHERE session = ? AND said IS NULL", (turn.number, turn.session)
    )


async def begin_pause(db: aiosqlite.Connection, turn: Turn, calls: Iterable[ToolCall]) -> None:
    """A turn ended on tool calls."""
    for position, call in enumerate(calls):
        values = (
            turn.session,
            turn.number,
            position,
            call.id,
            call.name,
            call.arguments,
            CallStatus.PENDING.value,
        )
        await db.execute(
            "INSERT INTO calls VALUES (?, ?, ?, ?, ?, ?, ?, NULL, 0, '', '{}', ?, 0, '', 0, 0, 0, NULL)",
            (*values, time.time()),
        )


async def copy_pause(db: aiosqlite.Connection, parent: str, child: str, turn: int) -> None:
    """A session begins with the calls that its parent's turn `turn` ended on, as they were made."""
    await db.execute(
        "INSERT INTO calls SELECT ?, turn, position, id, name, arguments, ?, NULL, 0, '', '{}', ?, 0, '', 0, 0, 0, NULL"
        " FROM calls WHERE session = ? AND turn = ?",
        (child, CallStatus.PENDING.value, time.time(), parent, turn),
    )


async def write_report(db: aiosqlite.Connection, session: str, call: PendingCall) -> None:
    """The client told something new of a call."""
    told = (call.started, call.arguments, rows.pieces_text(call), call.delta_due)
    await db.execute(
        "UPDATE calls SET started = ?, running = ?, pieces = ?, delta_due = ?, status = ?, result = ?, batch = ?,"
        " last_event_at = ? WHERE session = ? AND turn = ? AND position = ?",
        (
            *told,
            call.status.value,
            call.result,
            call.batch,
            time.time(),
            session,
            call.turn,
            call.position,
        ),
    )


async def silent(db: aiosqlite.Connection, since: float) -> list[str]:
    """The sessions with a call of which nothing was heard after `since`."""
    query = "SELECT DISTINCT session FROM calls WHERE status = 'pending' AND said IS NULL AND last_event_at <= ?"
    return [row["session"] for row in await every(db, query, (since,))]


async def mark_repaired(db: aiosqlite.Connection, session: str, commit: RepairCommit) -> None:
    """A repair is not due any more."""
    repair = commit.repair
    if repair.trigger is RepairTrigger.LAST_OUTPUT:
        await db.execute("UPDATE sessions SET output_due = 0 WHERE id = ?", (session,))
        return
    change, where, values = {
        RepairTrigger.TOOL_CALL: (
            "call_signal = ?",
            "position = ?",
            (repair.text, session, repair.position),
        ),
        RepairTrigger.TOOL_DELTA: (
            "delta_repaired = ?",
            "position = ?",
            (repair.reach, session, repair.position),
        ),
        RepairTrigger.TOOL_RESULT: ("result_repaired = ?", "batch = ?", (1, session, repair.batch)),
    }[repair.trigger]
    await db.execute(
        f"UPDATE calls SET {change} WHERE session = ? AND said IS NULL AND {where}", values
    )


async def add_repair(
    db: aiosqlite.Connection, session: str, turn: int, report: RepairReport, details: RepairDetails
) -> None:
    """Keep a repair that was run for `turn`, and forget the oldest when there are too many."""
    told, signal, positions = rows.repair_columns(report, details)
    row = await one(
        db,
        "INSERT INTO repairs SELECT ?, 1 + coalesce(max(number), 0), ?, ?, ?, ?, ? FROM repairs WHERE session = ?"
        " RETURNING number",
        (session, turn, time.time(), told, signal, positions, session),
    )
    assert row is not None, "an INSERT that succeeds returns its row"
    oldest = row["number"] - REPAIRS_KEPT
    await db.execute("DELETE FROM repairs WHERE session = ? AND number <= ?", (session, oldest))


async def read_repairs(db: aiosqlite.Connection, session: str, limit: int) -> list[RepairRecord]:
    """The last repairs, the newest first."""
    query = "SELECT * FROM repairs WHERE session = ? ORDER BY number DESC LIMIT ?"
    return [rows.repair_value(row) for row in await every(db, query, (session, limit))]


async def reports_since(
    db: aiosqlite.Connection, session: str, turns: int
) -> tuple[RepairReport, ...]:
    """The reports of the repairs that were run after that many turns, in the order they were run."""
    query = "SELECT report FROM repairs WHERE session = ? AND turn > ? ORDER BY number"
    return tuple(
        REPAIR.validate_json(row["report"]) for row in await every(db, query, (session, turns))
    )
