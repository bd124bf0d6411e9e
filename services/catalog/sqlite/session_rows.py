"""Rows of `sessions` and `worker_states`. Each function runs in the caller's transaction."""

import aiosqlite

from kvrecall.domain.reports import MemoryReport
from kvrecall.domain.session import Session
from services.catalog.records import KeptState
from services.catalog.serialization import MEMORY, seal
from services.catalog.sqlite import mapping, page_refs
from services.catalog.sqlite.queries import insert


async def add_session(
    db: aiosqlite.Connection, session: Session, worker_state: bytes, now: float
) -> None:
    """Add a session without turns, with the pages it references. `now` is in Unix seconds."""
    lifetime = session.settings.get_lifetime(session.turns)
    expiry = {"expires_at": None if lifetime is None else now + lifetime}
    await insert(db, "sessions", [{**mapping.to_session_row(session), **expiry}])
    await insert(db, "worker_states", [{"session": session.id, "state": seal(worker_state)}])
    await page_refs.replace_refs(db, session.id, session.shared)
    await add_commit_point(db, session.id, session.epoch, session.memory.length)


async def add_commit_point(
    db: aiosqlite.Connection, session_id: str, epoch: int, length: int
) -> None:
    """Record that `length` tokens are committed under `epoch`; no tokens leave no record."""
    if length:
        await db.execute(
            "REPLACE INTO commit_points (session, epoch, length)"
            " VALUES (:session, :epoch, :length)",
            {"session": session_id, "epoch": epoch, "length": length},
        )


async def replace_worker_state(db: aiosqlite.Connection, session_id: str, state: bytes) -> None:
    """Replace the serialized pb.SessionState."""
    await db.execute(
        "UPDATE worker_states SET state = :state WHERE session = :session",
        {"state": seal(state), "session": session_id},
    )


async def replace_memory(db: aiosqlite.Connection, session_id: str, memory: MemoryReport) -> None:
    """Replace the memory report, and the length in tokens that follows from it."""
    await db.execute(
        "UPDATE sessions SET memory = :memory, length = :length WHERE id = :session",
        {
            "memory": MEMORY.dump_json(memory).decode(),
            "length": memory.length,
            "session": session_id,
        },
    )


async def keep_state(db: aiosqlite.Connection, session_id: str, turn: int, kept: KeptState) -> None:
    """Keep the state at the end of a turn, and drop the one that is due to be."""
    row = {"session": session_id, "turn": turn, "state": kept.packed}
    await insert(db, "turn_states", [row])
    await db.execute(
        "DELETE FROM turn_states WHERE session = :session AND turn = :turn",
        {"session": session_id, "turn": kept.get_dropped(turn)},
    )
