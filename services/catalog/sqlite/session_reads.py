"""Whole sessions from the SQLite catalog. The functions run in a `SnapshotReader`'s snapshot."""

import sqlite3

from kvrecall.domain.errors import UnknownSession
from kvrecall.domain.reports import RepairReport
from kvrecall.domain.session import Session, SharedPages
from kvrecall.domain.state_machine import SessionState
from kvrecall.domain.tool_calls import PendingCall
from services.catalog.records import SessionPage
from services.catalog.serialization import COMMIT_POINTS, REPAIR, decode_cursor, encode_cursor
from services.catalog.sqlite import mapping
from services.catalog.sqlite.page_refs import RESERVED
from services.catalog.sqlite.queries import Row, fetch_value
from services.catalog.sqlite.tool_calls import IS_OPEN


def read_session(db: sqlite3.Connection, session_id: str, tenant: str | None = None) -> Session:
    """Read a session as last committed, if it is the tenant's. Raises UnknownSession."""
    row = db.execute(
        "SELECT * FROM sessions WHERE id = :id AND (:tenant IS NULL OR tenant = :tenant)",
        {"id": session_id, "tenant": tenant},
    ).fetchone()
    if row is None:
        raise UnknownSession(session_id)
    return _read_whole_session(db, row)


def read_page(db: sqlite3.Connection, limit: int, cursor: str | None, tenant: str) -> SessionPage:
    """Read up to `limit` sessions of a tenant, newest first. Raises InvalidRequest."""
    after = "" if cursor is None else "AND (created_at, id) < (:created_at, :id)"
    bound: dict[str, object] = {}
    if cursor is not None:
        bound = dict(zip(("created_at", "id"), decode_cursor(cursor), strict=True))
    found = read_sessions(
        db,
        f"tenant = :tenant {after} ORDER BY created_at DESC, id DESC LIMIT :limit",
        {"tenant": tenant, "limit": limit + 1} | bound,
    )
    sessions = tuple(found[:limit])
    return SessionPage(sessions, encode_cursor(sessions[-1]) if len(found) > limit else None)


def read_sessions(db: sqlite3.Connection, where: str, values: Row) -> list[Session]:
    """Read the sessions of a condition, which may go on with an order and a limit."""
    rows = db.execute(f"SELECT * FROM sessions WHERE {where}", values).fetchall()
    return [_read_whole_session(db, row) for row in rows]


def count_sessions(db: sqlite3.Connection, tenant: str) -> int:
    """Count the tenant's sessions."""
    row = db.execute("SELECT sessions FROM tenants WHERE tenant = ?", (tenant,)).fetchone()
    return 0 if row is None else int(row["sessions"])


def count_by_state(db: sqlite3.Connection) -> dict[SessionState, int]:
    """Count the idle and the paused sessions of all tenants."""
    total = fetch_value(db, "SELECT coalesce(sum(sessions), 0) FROM tenants")
    paused = fetch_value(
        db,
        "SELECT count(DISTINCT session) FROM tool_calls"
        " WHERE status = 'pending' AND consumed_in_turn IS NULL",
    )
    return {SessionState.PAUSED: paused, SessionState.IDLE: max(0, total - paused)}


def _read_whole_session(db: sqlite3.Connection, row: sqlite3.Row) -> Session:
    session_id = row["id"]
    return mapping.from_session_row(
        row,
        _read_open_calls(db, session_id),
        _read_reports_since(db, session_id, row["turns"]),
        _read_refs(db, session_id),
    )


def _read_open_calls(db: sqlite3.Connection, session_id: str) -> tuple[PendingCall, ...]:
    """Read the calls whose results no turn has consumed, in call order."""
    query = f"SELECT * FROM tool_calls WHERE {IS_OPEN} ORDER BY turn, position"
    rows = db.execute(query, {"session": session_id})
    return tuple(mapping.from_call_row(row) for row in rows)


def _read_reports_since(
    db: sqlite3.Connection, session_id: str, turns: int
) -> tuple[RepairReport, ...]:
    """Read the reports of the repairs after that many turns, in the order they were run."""
    query = "SELECT report FROM repairs WHERE session = ? AND turn > ? ORDER BY number"
    rows = db.execute(query, (session_id, turns))
    return tuple(REPAIR.validate_json(row["report"]) for row in rows)


def _read_refs(db: sqlite3.Connection, session_id: str) -> tuple[SharedPages, ...]:
    """Read the pages of other sessions that the session starts with, without reservations."""
    query = (
        "SELECT owner, pages, history FROM page_refs WHERE session = ? AND position > ?"
        " ORDER BY position"
    )
    rows = db.execute(query, (session_id, RESERVED))
    return tuple(
        SharedPages(row["owner"], row["pages"], COMMIT_POINTS.validate_json(row["history"]))
        for row in rows
    )
