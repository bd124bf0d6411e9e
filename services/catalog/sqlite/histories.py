"""Conversations at the ends of turns, by digest, in the SQLite catalog."""

import json
import sqlite3
from collections.abc import Sequence

from services.catalog.encryption.encryption import Encryption
from services.catalog.records import HistoryEntry
from services.catalog.sqlite.storage.database import Database
from services.catalog.sqlite.storage.queries import (
    fetch_all,
)


class SqliteHistories:
    """The ends of turns by the digests of their conversations; they go with their sessions."""

    def __init__(self, database: Database, encryption: Encryption) -> None:
        self._database = database
        self._name = encryption.name_digest

    async def find(self, digests: Sequence[str]) -> list[HistoryEntry]:
        """Return the known ones of these digests, in their order."""
        query = (
            "SELECT digest, session, turn FROM json_each(:digests)"
            " JOIN histories ON digest = value ORDER BY key"
        )
        names = [self._name(digest) for digest in digests]
        by_name = dict(zip(names, digests, strict=True))
        values = {"digests": json.dumps(names)}
        rows = await self._database.read(lambda db: fetch_all(db, query, values))
        return [HistoryEntry(by_name[row["digest"]], row["session"], row["turn"]) for row in rows]


def add_history(db: sqlite3.Connection, entry: HistoryEntry) -> None:
    """Note the end of a turn under the name of its digest.

    Of the same conversation in several sessions the last one counts.
    """
    db.execute(
        "REPLACE INTO histories (digest, session, turn) VALUES (:digest, :session, :turn)",
        {"digest": entry.digest, "session": entry.session, "turn": entry.turn},
    )
