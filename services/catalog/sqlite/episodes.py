"""Segments and episodes in the SQLite catalog. The functions run in the caller's transaction."""

import sqlite3

from kvrecall.domain.errors import UnknownEpisode
from services.catalog.encryption.cipher import Cipher
from services.catalog.encryption.encryption import Encryption
from services.catalog.records import BuildCommit, EpisodeSet, SegmentRecord, SegmentsCommit
from services.catalog.serialization import seal, unseal
from services.catalog.sqlite import mapping
from services.catalog.sqlite.storage.database import Database
from services.catalog.sqlite.storage.queries import (
    build_insert,
    fetch_all,
    fetch_one,
    insert,
    require_session,
)


class SqliteEpisodes:
    """Segments and episodes of each session."""

    def __init__(self, database: Database, encryption: Encryption) -> None:
        self._database = database
        self._ciphers = encryption.sessions

    async def get(self, session_id: str) -> EpisodeSet:
        """Return the session's episodes without their rows. Raises UnknownSession."""
        cipher = await self._ciphers.to_read(session_id)

        def read(db: sqlite3.Connection) -> EpisodeSet:
            require_session(db, session_id)
            return _read_set(db, session_id, cipher)

        return await self._database.read(read)

    async def get_segments(self, session_id: str) -> list[SegmentRecord]:
        """Return all embedded segments, in time order."""
        query = "SELECT * FROM segments WHERE session = :session ORDER BY number"
        cipher = await self._ciphers.to_read(session_id)
        rows = await self._database.read(lambda db: fetch_all(db, query, {"session": session_id}))
        return [mapping.from_segment_row(row, cipher) for row in rows]

    async def get_built(self, session_id: str, episode_id: str) -> bytes:
        """Return a serialized pb.Episode. Raises UnknownEpisode."""
        query = "SELECT built FROM built_episodes WHERE session = :session AND episode = :episode"
        values = {"session": session_id, "episode": episode_id}
        cipher = await self._ciphers.to_read(session_id)

        def read(db: sqlite3.Connection) -> bytes:
            row = fetch_one(db, query, values)
            if row is None:
                raise UnknownEpisode(session_id, episode_id)
            return unseal(cipher.open(row["built"], f"built_episodes.built {episode_id}"))

        return await self._database.read(read)

    async def commit_segments(self, session_id: str, commit: SegmentsCommit, epoch: int) -> None:
        """Add segments. Raises UnknownSession, StaleEpoch."""
        cipher = await self._ciphers.to_write(session_id)
        await self._database.write_fenced(
            session_id, epoch, lambda db: add_segments(db, session_id, commit, cipher)
        )

    async def commit_build(self, session_id: str, commit: BuildCommit, epoch: int) -> None:
        """Replace the episodes. Raises UnknownSession, StaleEpoch."""
        cipher = await self._ciphers.to_write(session_id)
        await self._database.write_fenced(
            session_id, epoch, lambda db: replace_episodes(db, session_id, commit, cipher)
        )

    async def clear(self, session_id: str, epoch: int) -> None:
        """Delete segments and episodes. Raises UnknownSession, StaleEpoch."""
        await self._database.write_fenced(session_id, epoch, lambda db: _clear(db, session_id))


def add_segments(
    db: sqlite3.Connection, session_id: str, commit: SegmentsCommit, cipher: Cipher
) -> None:
    """Add segments, and store centroid and size of the episodes they were assigned to."""
    rows = [mapping.to_segment_row(session_id, segment, cipher) for segment in commit.segments]
    insert(db, "segments", rows)
    db.executemany(
        "UPDATE episodes SET centroid = :centroid, segments = :segments, tokens = :tokens"
        " WHERE session = :session AND id = :id",
        [
            mapping.to_episode_row(session_id, number, episode, cipher)
            for number, episode in enumerate(commit.episode_set.episodes)
        ],
    )
    _write_set(db, session_id, commit.episode_set)


def replace_episodes(
    db: sqlite3.Connection, session_id: str, commit: BuildCommit, cipher: Cipher
) -> None:
    """Replace all episodes by newly built ones, and relabel the segments."""
    _delete_episodes(db, session_id)
    episodes = commit.episode_set.episodes
    rows = [
        mapping.to_episode_row(session_id, number, episode, cipher)
        for number, episode in enumerate(episodes)
    ]
    insert(db, "episodes", rows)
    built = [
        {
            "session": session_id,
            "episode": episode.id,
            "built": cipher.seal(seal(data), f"built_episodes.built {episode.id}"),
        }
        for episode, data in zip(episodes, commit.built, strict=True)
    ]
    insert(db, "built_episodes", built)
    db.executemany(
        "UPDATE segments SET label = :label WHERE session = :session AND number = :number",
        [
            {"label": label, "session": session_id, "number": number}
            for number, label in enumerate(commit.labels)
        ],
    )
    _write_set(db, session_id, commit.episode_set)


def count_match(db: sqlite3.Connection, session_id: str, matched: str, active: str) -> None:
    """Count a turn for the episode it was matched with, and store the active episode."""
    db.execute(
        "UPDATE episode_sets SET active = :active WHERE session = :session",
        {"active": active, "session": session_id},
    )
    db.execute(
        "UPDATE episodes SET matched = matched + 1 WHERE session = :session AND id = :matched",
        {"session": session_id, "matched": matched},
    )


def _read_set(db: sqlite3.Connection, session_id: str, cipher: Cipher) -> EpisodeSet:
    values = {"session": session_id}
    row = fetch_one(db, "SELECT * FROM episode_sets WHERE session = :session", values)
    if row is None:
        return EpisodeSet()
    query = "SELECT * FROM episodes WHERE session = :session ORDER BY number"
    rows = fetch_all(db, query, values)
    episodes = tuple(mapping.from_episode_row(each, cipher) for each in rows)
    return mapping.from_episode_set_row(row, episodes)


def _write_set(db: sqlite3.Connection, session_id: str, episode_set: EpisodeSet) -> None:
    row = mapping.to_episode_set_row(session_id, episode_set)
    changes = ", ".join(f"{name} = excluded.{name}" for name in mapping.EPISODE_SET_COLUMNS)
    db.execute(
        f"{build_insert('episode_sets', row)} ON CONFLICT (session) DO UPDATE SET {changes}", row
    )


def _clear(db: sqlite3.Connection, session_id: str) -> None:
    """Delete segments and episodes; the count of builds stays, so that no id is used twice."""
    query = "SELECT builds FROM episode_sets WHERE session = :session"
    row = fetch_one(db, query, {"session": session_id})
    builds = 0 if row is None else int(row["builds"])
    _delete_episodes(db, session_id)
    db.execute("DELETE FROM segments WHERE session = :session", {"session": session_id})
    _write_set(db, session_id, EpisodeSet(builds=builds))


def _delete_episodes(db: sqlite3.Connection, session_id: str) -> None:
    values = {"session": session_id}
    db.execute("DELETE FROM built_episodes WHERE session = :session", values)
    db.execute("DELETE FROM episodes WHERE session = :session", values)
