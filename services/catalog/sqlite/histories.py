"""Conversations at the ends of turns, by digest, in the SQLite catalog."""

import json
import sqlite3
from collections.abc import Sequence

from services.catalog.records import HistoryEntry
from services.catalog.sqlite.storage.database import Database
from services.catalog.sqlite.storage.queries import (
    fetch_all,
)


class SqliteHistories:
    """The ends of turns by the digests of their conversations; they go with their sessions."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def find(self, digests: Sequence[str]) -> list[HistoryEntry]:
        """Return the known ones of these digests, in their order."""
        query = (
            "SELECT digest, session, turn FROM json_each(:digests)"
            " JOIN histories ON digest = value ORDER BY key"
        )
        values = {"digests": json.dumps(list(digests))}
        rows = await self._database.read(lambda db: fetch_all(db, query, values))
        return [HistoryEntry(row["digest"], row["session"], row["turn"]) for row in rows]


def add_history(db: sqlite3.Connection, entry: HistoryEntry) -> None:
    """Note the end of a turn; of the same conversation in several sessions the last one counts."""
    db.execute(
        "REPLACE INTO histories (digest, session, turn) VALUES (:digest, :session, :turn)",
        {"digest": entry.digest, "session": entry.session, "turn": entry.turn},
    )
