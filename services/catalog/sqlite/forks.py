"""A session that begins as another was, in the SQLite catalog: rows are copied by the database itself."""

import aiosqlite

from kvrecall.domain.errors import UnknownSession, UnknownTurn
from services.catalog.base import ForkCommit
from services.catalog.sqlite import page_refs as sharing
from services.catalog.sqlite import sessions
from services.catalog.sqlite import tool_calls as pauses
from services.catalog.sqlite.statements import every, one

_KNOWN_SINCE = ("repairs", "episode_sets", "segments", "episodes", "built_episodes")


async def fork(db: aiosqlite.Connection, commit: ForkCommit) -> None:
    """Add the child, within a transaction of the caller. Raises UnknownSession, UnknownTurn."""
    parent = commit.parent
    child = commit.session.id
    turns = commit.turns
    row = await one(db, "SELECT turns FROM sessions WHERE id = ?", (parent,))
    if row is None:
        raise UnknownSession(parent)
    if not 0 <= turns <= row["turns"]:
        raise UnknownTurn(parent, turns)
    await sharing.check_shared(db, commit.session.shared)
    await sessions.add(db, commit.session, commit.worker_state)
    await _copy(db, "turns", parent, child, f"number <= {turns}")
    await _copy(db, "calls", parent, child, f"turn < {turns}")
    if turns < row["turns"]:
        await pauses.copy_pause(db, parent, child, turns)
        return
    await _copy(db, "calls", parent, child, f"turn = {turns}")
    for table in _KNOWN_SINCE:
        await _copy(db, table, parent, child, "true")


async def _copy(db: aiosqlite.Connection, table: str, parent: str, child: str, where: str) -> None:
    """Rows of a table with a column `session`."""
    found = await every(
        db, "SELECT name FROM pragma_table_info(?) WHERE name <> 'session'", (table,)
    )
    columns = ", ".join(row["name"] for row in found)
    insert = f"INSERT INTO {table} (session, {columns}) SELECT ?, {columns} FROM {table} WHERE session = ? AND {where}"
    await db.execute(insert, (child, parent))
