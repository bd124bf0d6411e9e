"""Sessions as rows of the SQLite catalog: added, changed, and read whole.

Changes run in the caller's transaction, reads in a `SnapshotReader`'s snapshot.
"""

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from kvrecall.domain.errors import DataKeyDeleted, UnknownSession
from kvrecall.domain.reports import MemoryReport, RepairReport
from kvrecall.domain.sessions.session import Session
from kvrecall.domain.sessions.state_machine import SessionState
from kvrecall.domain.tool_calls import PendingCall
from services.catalog.encryption.cipher import Cipher
from services.catalog.records import KeptState, SessionPage
from services.catalog.serialization import (
    MEMORY,
    REPAIR,
    decode_cursor,
    encode_place,
    seal,
    unseal,
)
from services.catalog.sqlite import mapping
from services.catalog.sqlite.pages import set_pages
from services.catalog.sqlite.storage.queries import Row, fetch_all, fetch_one, fetch_value, insert
from services.catalog.sqlite.tool_calls import IS_OPEN


def add_session(
    db: sqlite3.Connection,
    session: Session,
    worker_state: bytes,
    now: float,
    cipher: Cipher,
    page_ids: bytes = b"",
) -> None:
    """Add a session without turns, with its pages. `now` is in Unix seconds."""
    lifetime = session.settings.get_lifetime(session.turns)
    expiry = {"expires_at": None if lifetime is None else now + lifetime}
    insert(db, "sessions", [{**mapping.to_session_row(session, cipher), **expiry}])
    state = seal_state(session.id, worker_state, cipher)
    row = {"session": session.id, "state": state, "page_ids": seal(page_ids)}
    insert(db, "worker_states", [row])
    set_pages(db, session.id, page_ids)


def seal_state(session_id: str, state: bytes, cipher: Cipher) -> bytes:
    """Build the column `state` of a serialized pb.SessionState."""
    return cipher.seal(seal(state), f"worker_states.state {session_id}")


def open_state(session_id: str, sealed: bytes, cipher: Cipher) -> bytes:
    """Read the column `state`. Raises ValueError for a damaged one."""
    return unseal(cipher.open(sealed, f"worker_states.state {session_id}"))


def replace_worker_state(
    db: sqlite3.Connection, session_id: str, state: bytes, cipher: Cipher
) -> None:
    """Replace the serialized pb.SessionState, of the same pages."""
    db.execute(
        "UPDATE worker_states SET state = :state WHERE session = :session",
        {"state": seal_state(session_id, state, cipher), "session": session_id},
    )


def replace_pages(
    db: sqlite3.Connection, session_id: str, state: bytes, page_ids: bytes, cipher: Cipher
) -> None:
    """Replace the serialized pb.SessionState and the ids of its pages."""
    sealed = seal_state(session_id, state, cipher)
    db.execute(
        "UPDATE worker_states SET state = :state, page_ids = :page_ids WHERE session = :session",
        {"state": sealed, "page_ids": seal(page_ids), "session": session_id},
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


def keep_state(
    db: sqlite3.Connection, session_id: str, turn: int, kept: KeptState, cipher: Cipher
) -> None:
    """Keep the state at the end of a turn, and drop the one that is due to be."""
    state = cipher.seal(kept.packed, f"turn_states.state {session_id} {turn}")
    row = {"session": session_id, "turn": turn, "state": state}
    insert(db, "turn_states", [row])
    db.execute(
        "DELETE FROM turn_states WHERE session = :session AND turn = :turn",
        {"session": session_id, "turn": kept.get_dropped(turn)},
    )


def read_kept_state(
    db: sqlite3.Connection, session_id: str, turn: int, cipher: Cipher
) -> bytes | None:
    """Read the packed state at the end of a turn, None if it was not kept."""
    query = "SELECT state FROM turn_states WHERE session = :session AND turn = :turn"
    row = fetch_one(db, query, {"session": session_id, "turn": turn})
    place = f"turn_states.state {session_id} {turn}"
    return None if row is None else cipher.open(row["state"], place)


def read_session(
    db: sqlite3.Connection, session_id: str, cipher: Cipher, tenant: str | None = None
) -> Session:
    """Read a session as last committed, if it is the tenant's. Raises UnknownSession."""
    row = db.execute(
        "SELECT * FROM sessions WHERE id = :id AND (:tenant IS NULL OR tenant = :tenant)",
        {"id": session_id, "tenant": tenant},
    ).fetchone()
    if row is None:
        raise UnknownSession(session_id)
    return _read_whole_session(db, row, cipher)


def read_page(
    db: sqlite3.Connection, limit: int, cursor: str | None, tenant: str, cipher: Cipher
) -> SessionPage:
    """Read up to `limit` sessions of a tenant, newest first. Raises InvalidRequest.

    Those whose data key was deleted are left out.
    """
    after = "" if cursor is None else "AND (created_at, id) < (:created_at, :id)"
    bound: dict[str, object] = {}
    if cursor is not None:
        bound = dict(zip(("created_at", "id"), decode_cursor(cursor), strict=True))
    rows = fetch_all(
        db,
        f"SELECT * FROM sessions WHERE tenant = :tenant {after}"
        " ORDER BY created_at DESC, id DESC LIMIT :limit",
        {"tenant": tenant, "limit": limit + 1} | bound,
    )
    shown = rows[:limit]
    is_last = len(rows) <= limit
    next_cursor = None if is_last else encode_place(shown[-1]["created_at"], shown[-1]["id"])
    return SessionPage(tuple(_iter_readable(db, shown, {tenant: cipher})), next_cursor)


def read_sessions(
    db: sqlite3.Connection, where: str, values: Row, ciphers: Mapping[str, Cipher]
) -> list[Session]:
    """Read the sessions of a condition, which may go on with an order and a limit.

    Those of tenants without a cipher in `ciphers`, and whose data key was deleted, are left out.
    """
    rows = fetch_all(db, f"SELECT * FROM sessions WHERE {where}", values)
    return list(_iter_readable(db, rows, ciphers))


def read_tenants(db: sqlite3.Connection, where: str, values: Row) -> list[str]:
    """Read the tenants of the sessions of a condition, as of `read_sessions`."""
    query = f"SELECT DISTINCT tenant FROM (SELECT tenant FROM sessions WHERE {where})"
    return [row["tenant"] for row in fetch_all(db, query, values)]


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


def _iter_readable(
    db: sqlite3.Connection, rows: Sequence[sqlite3.Row], ciphers: Mapping[str, Cipher]
) -> Iterator[Session]:
    for row in rows:
        if row["tenant"] in ciphers:
            with suppress(DataKeyDeleted):
                yield _read_whole_session(db, row, ciphers[row["tenant"]])


def _read_whole_session(db: sqlite3.Connection, row: sqlite3.Row, cipher: Cipher) -> Session:
    session_id = row["id"]
    return mapping.from_session_row(
        row,
        _read_open_calls(db, session_id, cipher),
        _read_reports_since(db, session_id, row["turns"]),
        cipher,
    )


def _read_open_calls(
    db: sqlite3.Connection, session_id: str, cipher: Cipher
) -> tuple[PendingCall, ...]:
    """Read the calls whose results no turn has consumed, in call order."""
    query = f"SELECT * FROM tool_calls WHERE {IS_OPEN} ORDER BY turn, position"
    rows = db.execute(query, {"session": session_id})
    return tuple(mapping.from_call_row(row, cipher) for row in rows)


def _read_reports_since(
    db: sqlite3.Connection, session_id: str, turns: int
) -> tuple[RepairReport, ...]:
    """Read the reports of the repairs after that many turns, in the order they were run."""
    query = "SELECT report FROM repairs WHERE session = ? AND turn > ? ORDER BY number"
    rows = db.execute(query, (session_id, turns))
    return tuple(REPAIR.validate_json(row["report"]) for row in rows)
