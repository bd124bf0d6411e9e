"""Sessions that start as copies in the SQLite catalog: forks, and sessions from elsewhere.

Each function runs in the caller's transaction.
"""

import sqlite3
from dataclasses import replace

from kvrecall.domain.errors import CatalogError, UnknownSession, UnknownTurn
from services.catalog.records import (
    BuildCommit,
    EpisodeSet,
    ForkCommit,
    SegmentsCommit,
    SessionDump,
)
from services.catalog.sqlite import episodes, mapping, page_refs, session_rows, tool_calls
from services.catalog.sqlite.queries import fetch_all, fetch_one, insert

_TABLES_OF_CALLS = ("tool_calls", "tool_output")
# Tables that a fork copies only at its parent's last turn.
_TABLES_AT_LAST_TURN = ("repairs", "episode_sets", "segments", "episodes", "built_episodes")


def fork(db: sqlite3.Connection, commit: ForkCommit, now: float) -> None:
    """Add the child, copying rows within the database. Raises UnknownSession, UnknownTurn."""
    parent = commit.parent
    child = commit.session.id
    turns = commit.turns
    query = "SELECT turns FROM sessions WHERE id = :parent"
    row = fetch_one(db, query, {"parent": parent})
    if row is None:
        raise UnknownSession(parent)
    if not 0 <= turns <= row["turns"]:
        raise UnknownTurn(parent, turns)
    page_refs.require_pages(db, commit.session.shared)
    page_refs.clear_orphaned(db, child)
    session_rows.add_session(db, commit.session, commit.worker_state, now)
    _copy(db, "turns", commit, "number <= :turns")
    for table in _TABLES_OF_CALLS:
        _copy(db, table, commit, "turn < :turns")
    if turns < row["turns"]:
        tool_calls.copy_pause(db, parent, child, turns, now)
        return
    for table in _TABLES_OF_CALLS:
        _copy(db, table, commit, "turn = :turns")
    for table in _TABLES_AT_LAST_TURN:
        _copy(db, table, commit, "true")


def _copy(db: sqlite3.Connection, table: str, commit: ForkCommit, where: str) -> None:
    """Copy rows of a table with a column `session` from the parent to the child."""
    query = "SELECT name FROM pragma_table_info(:table) WHERE name <> 'session'"
    columns = ", ".join(row["name"] for row in fetch_all(db, query, {"table": table}))
    db.execute(
        f"INSERT INTO {table} (session, {columns}) SELECT :child, {columns} FROM {table}"
        f" WHERE session = :parent AND {where}",
        {"child": commit.session.id, "parent": commit.parent, "turns": commit.turns},
    )


def restore(db: sqlite3.Connection, dump: SessionDump, now: float) -> None:
    """Add a session from another catalog. Raises CatalogError when its id is taken."""
    session_id = dump.session.id
    query = "SELECT 1 FROM sessions WHERE id = :session"
    if fetch_one(db, query, {"session": session_id}) is not None:
        raise CatalogError(f"there is a session {session_id!r} already")
    # The restored rows are stored already: they must not be deleted as orphans of an earlier
    # session of that id.
    page_refs.clear_orphaned(db, session_id)
    session_rows.add_session(db, dump.session, dump.worker_state, now)
    insert(db, "turns", [mapping.to_turn_row(turn) for turn in dump.turns])
    tool_calls.add_calls(db, session_id, dump.calls)
    for call, pieces in dump.pieces.items():
        tool_calls.add_pieces(db, session_id, call, pieces)
    repairs = [mapping.to_repair_row(session_id, record) for record in dump.repairs]
    insert(db, "repairs", repairs)
    if dump.episodes != EpisodeSet():
        _restore_episodes(db, dump)


def _restore_episodes(db: sqlite3.Connection, dump: SessionDump) -> None:
    session_id = dump.session.id
    without_episodes = replace(dump.episodes, episodes=())
    episodes.add_segments(db, session_id, SegmentsCommit(dump.segments, without_episodes))
    labels = tuple(segment.label for segment in dump.segments)
    build = BuildCommit(dump.episodes, dump.built, labels)
    episodes.replace_episodes(db, session_id, build)
    episodes.count_match(db, session_id, "", dump.episodes.active)
