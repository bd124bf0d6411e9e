"""Sessions as rows of the SQLite catalog: added, changed, and read whole.

Changes run in the caller's transaction, reads in a `SnapshotReader`'s snapshot.
"""

import sqlite3

from kvrecall.domain.errors import UnknownSession
from kvrecall.domain.reports import MemoryReport, RepairReport
from kvrecall.domain.sessions.session import Session
from kvrecall.domain.sessions.state_machine import SessionState
from kvrecall.domain.tool_calls import PendingCall
from services.catalog.records import KeptState, SessionPage
from services.catalog.serialization import MEMORY, REPAIR, decode_cursor, encode_cursor, seal
from services.catalog.sqlite import mapping
from services.catalog.sqlite.pages import set_pages
from services.catalog.sqlite.storage.queries import Row, fetch_value, insert
from services.catalog.sqlite.tool_calls import IS_OPEN


def add_session(
    db: sqlite3.Connection,
    session: Session,
    worker_state: bytes,
    now: float,
    page_ids: bytes = b"",
) -> None:
    """Add a session without turns, with its pages. `now` is in Unix seconds."""
    lifetime = session.settings.get_lifetime(session.turns)
    expiry = {"expires_at": None if lifetime is None else now + lifetime}
    insert(db, "sessions", [{**mapping.to_session_row(session), **expiry}])
    state = {"session": session.id, "state": seal(worker_state), "page_ids": seal(page_ids)}
    insert(db, "worker_states", [state])
    set_pages(db, session.id, page_ids)


def replace_worker_state(db: sqlite3.Connection, session_id: str, state: bytes) -> None:
    """Replace the serialized pb.SessionState, of the same pages."""
    db.execute(
        "UPDATE worker_states SET state = :state WHERE session = :session",
        {"state": seal(state), "session": session_id},
    )


def replace_pages(db: sqlite3.Connection, session_id: str, state: bytes, page_ids: bytes) -> None:
    """Replace the serialized pb.SessionState and the ids of its pages."""
    db.execute(
        "UPDATE worker_states SET state = :state, page_ids = :page_ids WHERE session = :session",
        {"state": seal(state), "page_ids": seal(page_ids), "session": session_id},
    )
    set_pages(db, session_id, page_ids)


def replace_memory(db: sqlite3.Connection, session_id: str, memory: MemoryReport) -> None:
    """Replace the memory report, and the length in tokens that follows from it."""
    db.execute(
        "UPDATE sessions SET memory = :memory, length = :length WHERE id = :session",
        {
            "memory": MEMORY.dump_json(memory).decode(),
            "length": memory.length,
            "session": session_id,
        },
    )


def keep_state(db: sqlite3.Connection, session_id: str, turn: int, kept: KeptState) -> None:
    """Keep the state at the end of a turn, and drop the one that is due to be."""
    row = {"session": session_id, "turn": turn, "state": kept.packed}
    insert(db, "turn_states", [row])
    db.execute(
        "DELETE FROM turn_states WHERE session = :session AND turn = :turn",
        {"session": session_id, "turn": kept.get_dropped(turn)},
    )


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
