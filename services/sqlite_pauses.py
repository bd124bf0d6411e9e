"""Tool calls and repairs in the SQLite catalog. Each function runs within a transaction of its caller."""

from collections.abc import Iterable

import aiosqlite

from services.catalog import RepairCommit, TurnCommit
from services.messages import ToolCall
from services.sessions import CallStatus, RepairTrigger, Turn


async def end_pause(db: aiosqlite.Connection, commit: TurnCommit) -> None:
    """A turn said the results of all calls that waited for one."""
    turn = commit.turn
    for call, result in commit.said.items():
        await db.execute(
            "UPDATE calls SET status = ?, result = ? WHERE session = ? AND id = ? AND said IS NULL",
            (CallStatus.COMPLETED.value, result, turn.session, call),
        )
    await db.execute("UPDATE calls SET said = ? WHERE session = ? AND said IS NULL", (turn.number, turn.session))


async def begin_pause(db: aiosqlite.Connection, turn: Turn, calls: Iterable[ToolCall]) -> None:
    """A turn ended on tool calls."""
    for position, call in enumerate(calls):
        await db.execute(
            "INSERT INTO calls VALUES (?, ?, ?, ?, ?, ?, ?, NULL, 0, '', 0, 0, 0, NULL)",
            (turn.session, turn.number, position, call.id, call.name, call.arguments, CallStatus.PENDING.value),
        )


async def mark_repaired(db: aiosqlite.Connection, session: str, commit: RepairCommit) -> None:
    """A repair is not due any more."""
    repair = commit.repair
    if repair.trigger is RepairTrigger.TOOL_CALL:
        column, where, value = "call_repaired", "position = ?", repair.position
    else:
        column, where, value = "result_repaired", "batch = ?", repair.batch
    query = f"UPDATE calls SET {column} = 1 WHERE session = ? AND said IS NULL AND {where}"
    await db.execute(query, (session, value))


async def add_report(db: aiosqlite.Connection, session: str, report: str) -> None:
    """Keep a repair's report (JSON text) with the turn before it."""
    await db.execute(
        "INSERT INTO repairs SELECT id, turns,"
        " (SELECT count(*) FROM repairs WHERE session = id AND after_turn = turns), ? FROM sessions WHERE id = ?",
        (report, session),
    )
