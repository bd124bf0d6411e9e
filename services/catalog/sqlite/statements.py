"""The statements that every part of the SQLite catalog shares."""

import sqlite3
from collections.abc import Sequence

import aiosqlite

from kvrecall.domain.errors import StaleEpoch, UnknownSession


async def one(db: aiosqlite.Connection, query: str, values: Sequence[object]) -> sqlite3.Row | None:
    """The first row, if there is one."""
    found = await every(db, query, values)
    return found[0] if found else None


async def every(
    db: aiosqlite.Connection, query: str, values: Sequence[object]
) -> list[sqlite3.Row]:
    """All rows."""
    return list(await db.execute_fetchall(query, values))


async def check_session(db: aiosqlite.Connection, session: str) -> int:
    """The session's epoch. Raises UnknownSession."""
    row = await one(db, "SELECT epoch FROM sessions WHERE id = ?", (session,))
    if row is None:
        raise UnknownSession(session)
    return int(row["epoch"])


async def fence(db: aiosqlite.Connection, session: str, epoch: int) -> None:
    """Let nobody write who was taken over from. Raises UnknownSession, StaleEpoch."""
    now = await check_session(db, session)
    if now != epoch:
        raise StaleEpoch(
            f"session {session!r} is at epoch {now}, not {epoch}: another process took it over"
        )
