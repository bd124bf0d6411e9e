"""Sessions of the SQLite catalog by the time of their expiry."""

import sqlite3
from collections.abc import Sequence

from kvrecall.domain.sessions.session import Session
from services.catalog.encryption.encryption import Encryption
from services.catalog.sqlite.session_rows import (
    read_sessions,
    read_tenants,
)
from services.catalog.sqlite.storage.database import Database
from services.catalog.sqlite.storage.queries import (
    Row,
)
from services.catalog.sqlite.storage.reader import SnapshotReader


class SqliteExpiry:
    """Sessions by the time of their expiry, which each turn sets anew."""

    def __init__(self, database: Database, reader: SnapshotReader, encryption: Encryption) -> None:
        self._database = database
        self._reader = reader
        self._ciphers = encryption.tenants

    async def get_expired(self, limit: int) -> list[Session]:
        """Return up to `limit` sessions that have expired."""
        where = "expires_at <= :now ORDER BY expires_at LIMIT :limit"
        values = {"now": self._database.now(), "limit": limit}
        tenants = await self._reader.read(lambda db: read_tenants(db, where, values))
        return await self._read(where, values, tenants)

    async def get_next(self, tenant: str, limit: int) -> list[Session]:
        """Return up to `limit` of a tenant's sessions that are to expire, the next one first."""
        where = "tenant = :tenant AND expires_at IS NOT NULL ORDER BY expires_at LIMIT :limit"
        return await self._read(where, {"tenant": tenant, "limit": limit}, [tenant])

    async def _read(self, where: str, values: Row, tenants: Sequence[str]) -> list[Session]:
        ciphers = {tenant: await self._ciphers.to_read(tenant) for tenant in tenants}

        def read(db: sqlite3.Connection) -> list[Session]:
            return read_sessions(db, where, values, ciphers)

        return await self._reader.read(read)
