"""A session that comes from another catalog, in the SQLite catalog: everything of it in one transaction."""

from dataclasses import replace

import aiosqlite

from kvrecall.domain.errors import CatalogError
from kvrecall.domain.tool_calls import PendingCall
from services.catalog.base import BuildCommit, EpisodeSet, SegmentsCommit, SessionDump
from services.catalog.sqlite import episodes, sessions
from services.catalog.sqlite import mapping as rows
from services.catalog.sqlite.statements import one


async def restore(db: aiosqlite.Connection, dump: SessionDump) -> None:
    """Add the session, within a transaction of the caller. Raises CatalogError."""
    id = dump.session.id
    if await one(db, "SELECT 1 FROM sessions WHERE id = ?", (id,)) is not None:
        raise CatalogError(f"there is a session {id!r} already")
    # Its rows are stored already: what an earlier session of that id left must not be dropped with them.
    await db.execute("DELETE FROM leftovers WHERE owner = ?", (id,))
    await sessions.add(db, dump.session, dump.worker_state)
    await db.executemany(
        "INSERT INTO turns VALUES (?, ?, ?, ?, ?, ?)", [rows.turn_row(turn) for turn in dump.turns]
    )
    await db.executemany(
        f"INSERT INTO calls VALUES ({', '.join('?' * 18)})",
        [_call_row(id, call) for call in dump.calls],
    )
    await db.executemany(
        "INSERT INTO repairs VALUES (?, ?, ?, ?, ?, ?, ?)",
        [
            (id, each.number, each.turn, each.at, *rows.repair_columns(each.report, each.details))
            for each in dump.repairs
        ],
    )
    await _restore_episodes(db, dump)


async def _restore_episodes(db: aiosqlite.Connection, dump: SessionDump) -> None:
    id = dump.session.id
    found = dump.episodes
    if found == EpisodeSet():
        return
    await episodes.add_segments(db, id, SegmentsCommit(dump.segments, replace(found, episodes=())))
    labels = tuple(segment.label for segment in dump.segments)
    await episodes.replace_episodes(db, id, BuildCommit(found, dump.built, labels))
    await episodes.count_match(db, id, "", found.active)


def _call_row(session: str, call: PendingCall) -> tuple[object, ...]:
    """The columns of `calls`, in order."""
    made = (session, call.turn, call.position, call.call.id, call.call.name, call.call.arguments)
    told = (
        call.status.value,
        call.result,
        call.started,
        call.arguments,
        rows.pieces_text(call),
        call.last_event_at,
    )
    repaired = (
        call.batch,
        call.call_signal,
        call.delta_due,
        call.delta_repaired,
        call.result_repaired,
    )
    return (*made, *told, *repaired, call.consumed_in_turn)
