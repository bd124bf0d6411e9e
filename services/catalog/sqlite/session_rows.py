"""Rows of `sessions` and `worker_states`. Each function runs in the caller's transaction."""

import sqlite3

from kvrecall.domain.reports import MemoryReport
from kvrecall.domain.session import Session
from services.catalog.records import KeptState
from services.catalog.serialization import MEMORY, seal
from services.catalog.sqlite import mapping, page_refs
from services.catalog.sqlite.queries import insert


def add_session(db: sqlite3.Connection, session: Session, worker_state: bytes, now: float) -> None:
    """Add a session without turns, with the pages it references. `now` is in Unix seconds."""
    lifetime = session.settings.get_lifetime(session.turns)
    expiry = {"expires_at": None if lifetime is None else now + lifetime}
    insert(db, "sessions", [{**mapping.to_session_row(session), **expiry}])
    insert(db, "worker_states", [{"session": session.id, "state": seal(worker_state)}])
    page_refs.replace_refs(db, session.id, session.shared)
    add_commit_point(db, session.id, session.epoch, session.memory.rows)


def add_commit_point(db: sqlite3.Connection, session_id: str, epoch: int, length: int) -> None:
    """Record that `length` tokens are committed under `epoch`; no tokens leave no record."""
    if length:
        db.execute(
            "REPLACE INTO commit_points (session, epoch, length)"
            " VALUES (:session, :epoch, :length)",
            {"session": session_id, "epoch": epoch, "length": length},
        )


def replace_worker_state(db: sqlite3.Connection, session_id: str, state: bytes) -> None:
    """Replace the serialized pb.SessionState."""
    db.execute(
        "UPDATE worker_states SET state = :state WHERE session = :session",
        {"state": seal(state), "session": session_id},
    )


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
