"""A session's segments and episodes in the SQLite catalog. Each function runs within a transaction of its caller."""

import aiosqlite

from kvrecall.domain.errors import UnknownEpisode
from services.catalog.base import BuildCommit, EpisodeSet, SegmentRecord, SegmentsCommit
from services.catalog.sqlite import mapping as rows
from services.catalog.sqlite.statements import every, one


async def read_set(db: aiosqlite.Connection, session: str) -> EpisodeSet:
    """The session's episodes, none if nothing was embedded yet."""
    row = await one(db, "SELECT * FROM episode_sets WHERE session = ?", (session,))
    if row is None:
        return EpisodeSet()
    found = await every(db, "SELECT * FROM episodes WHERE session = ? ORDER BY number", (session,))
    return rows.episode_set_value(row, tuple(rows.episode_value(episode) for episode in found))


async def read_segments(db: aiosqlite.Connection, session: str) -> list[SegmentRecord]:
    """Every segment, in time order."""
    found = await every(db, "SELECT * FROM segments WHERE session = ? ORDER BY number", (session,))
    return [rows.segment_value(row) for row in found]


async def read_built(db: aiosqlite.Connection, session: str, episode: str) -> bytes:
    """An episode as the worker built it. Raises UnknownEpisode."""
    row = await one(
        db, "SELECT built FROM built_episodes WHERE session = ? AND episode = ?", (session, episode)
    )
    if row is None:
        raise UnknownEpisode(session, episode)
    return bytes(row["built"])


async def add_segments(db: aiosqlite.Connection, session: str, commit: SegmentsCommit) -> None:
    """Add segments; the episodes they were assigned to have grown."""
    await db.executemany(
        "INSERT INTO segments VALUES (?, ?, ?, ?, ?, ?)",
        [rows.segment_row(session, segment) for segment in commit.segments],
    )
    await db.executemany(
        "UPDATE episodes SET centroid = ?, segments = ?, tokens = ? WHERE session = ? AND id = ?",
        [
            (each.centroid, each.segments, each.tokens, session, each.id)
            for each in commit.found.episodes
        ],
    )
    await _write_set(db, session, commit.found)


async def replace_episodes(db: aiosqlite.Connection, session: str, commit: BuildCommit) -> None:
    """Put newly built episodes in the place of those before."""
    await _drop_episodes(db, session)
    episodes = commit.found.episodes
    await db.executemany(
        "INSERT INTO episodes VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        [rows.episode_row(session, number, episode) for number, episode in enumerate(episodes)],
    )
    await db.executemany(
        "INSERT INTO built_episodes VALUES (?, ?, ?)",
        [(session, episode.id, data) for episode, data in zip(episodes, commit.built, strict=True)],
    )
    await db.executemany(
        "UPDATE segments SET label = ? WHERE session = ? AND number = ?",
        [(label, session, number) for number, label in enumerate(commit.labels)],
    )
    await _write_set(db, session, commit.found)


async def forget(db: aiosqlite.Connection, session: str) -> None:
    """Drop everything but which episode is active, and the builds so far: no id is ever given twice."""
    builds = (await read_set(db, session)).builds
    await _drop_episodes(db, session)
    await db.execute("DELETE FROM segments WHERE session = ?", (session,))
    await _write_set(db, session, EpisodeSet(builds=builds))


async def count_match(db: aiosqlite.Connection, session: str, matched: str, active: str) -> None:
    """A turn was matched with an episode, and left one active."""
    await db.execute("UPDATE episode_sets SET active = ? WHERE session = ?", (active, session))
    await db.execute(
        "UPDATE episodes SET matched = matched + 1 WHERE session = ? AND id = ?", (session, matched)
    )


async def _drop_episodes(db: aiosqlite.Connection, session: str) -> None:
    await db.execute("DELETE FROM built_episodes WHERE session = ?", (session,))
    await db.execute("DELETE FROM episodes WHERE session = ?", (session,))


async def _write_set(db: aiosqlite.Connection, session: str, found: EpisodeSet) -> None:
    names = rows.EPISODE_SET_COLUMNS
    changes = ", ".join(f"{name} = excluded.{name}" for name in names)
    await db.execute(
        f"INSERT INTO episode_sets (session, active, {', '.join(names)}) VALUES (?, '', {', '.join('?' * len(names))})"
        f" ON CONFLICT (session) DO UPDATE SET {changes}",
        (session, *rows.episode_set_row(found)),
    )
