"""Sessions of the SQLite catalog by the time of their expiry."""

import sqlite3

from kvrecall.domain.sessions.session import Session
from services.catalog.sqlite.session_rows import (
    read_sessions,
)
from services.catalog.sqlite.storage.database import Database
from services.catalog.sqlite.storage.queries import (
    Row,
)
from services.catalog.sqlite.storage.reader import SnapshotReader


class SqliteExpiry:
    """Sessions by the time of their expiry, which each turn sets anew."""

    def __init__(self, database: Database, reader: SnapshotReader) -> None:
        self._database = database
        self._reader = reader

    async def get_expired(self, limit: int) -> list[Session]:
        """Return up to `limit` sessions that have expired."""
        where = "expires_at <= :now ORDER BY expires_at LIMIT :limit"
        return await self._read(where, {"now": self._database.now(), "limit": limit})

    async def get_next(self, tenant: str, limit: int) -> list[Session]:
        """Return up to `limit` of a tenant's sessions that are to expire, the next one first."""
        where = "tenant = :tenant AND expires_at IS NOT NULL ORDER BY expires_at LIMIT :limit"
        return await self._read(where, {"tenant": tenant, "limit": limit})

    async def _read(self, where: str, values: Row) -> list[Session]:
        def read(db: sqlite3.Connection) -> list[Session]:
            return read_sessions(db, where, values)

        return await self._reader.read(read)
