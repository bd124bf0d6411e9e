"""Sessions of the SQLite catalog that remember each other."""

import sqlite3

from kvrecall.domain.sessions.session import Session
from services.catalog.encryption.encryption import Encryption
from services.catalog.sqlite.session_rows import read_sessions
from services.catalog.sqlite.storage.queries import Row, insert
from services.catalog.sqlite.storage.reader import SnapshotReader


class SqliteMemories:
    """The sessions that remember each other, by the name of their memory; they go with their sessions."""

    def __init__(self, reader: SnapshotReader, encryption: Encryption) -> None:
        self._reader = reader
        self._encryption = encryption

    async def get_newest(self, tenant: str, memory: str, limit: int) -> list[Session]:
        """Return up to `limit` sessions of a tenant's memory, the newest first."""
        where = (
            "tenant = :tenant AND id IN (SELECT session FROM memories WHERE name = :name)"
            " ORDER BY created_at DESC, id DESC LIMIT :limit"
        )
        name = self._encryption.name_digest(memory)
        values: Row = {"tenant": tenant, "name": name, "limit": limit}
        ciphers = {tenant: await self._encryption.tenants.to_read(tenant)}
        return await self._reader.read(lambda db: read_sessions(db, where, values, ciphers))


def add_member(db: sqlite3.Connection, session: Session, encryption: Encryption) -> None:
    """Add a new session to its memory, if it has one."""
    if memory := session.settings.memory:
        insert(db, "memories", [{"session": session.id, "name": encryption.name_digest(memory)}])
