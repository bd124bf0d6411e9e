"""Claims and epochs of sessions in the SQLite catalog."""

import sqlite3

from kvrecall.domain.errors import UnknownSession
from kvrecall.domain.sessions.session import Session
from services.catalog.claims import Claims
from services.catalog.encryption.encryption import Encryption
from services.catalog.records import (
    Lease,
)
from services.catalog.sqlite.session_rows import (
    read_session,
)
from services.catalog.sqlite.storage.database import Database
from services.catalog.sqlite.storage.queries import (
    fetch_one,
)
from services.catalog.sqlite.storage.reader import SnapshotReader


class SqliteLeases:
    """Claims in memory, epochs in the file."""

    def __init__(
        self, database: Database, reader: SnapshotReader, claims: Claims, encryption: Encryption
    ) -> None:
        self._ciphers = encryption.sessions
        self._database = database
        self._reader = reader
        self._claims = claims

    async def claim(self, session_id: str, holder: str, seconds: float) -> Lease:
        """Claim the session, or extend the holder's claim. Raises SessionBusy, UnknownSession."""

        async def read() -> Session:
            cipher = await self._ciphers.to_read(session_id)
            return await self._reader.read(lambda db: read_session(db, session_id, cipher))

        session = await self._database.cache.get(session_id, read)  # a turn has just read it
        self._claims.acquire(session_id, holder, seconds)
        return Lease(session.epoch, session.worker)

    async def release(self, session_id: str, holder: str) -> None:
        """Release the holder's claim."""
        self._claims.release(session_id, holder)

    async def take_over(self, session_id: str, worker: str) -> int:
        """Start a new epoch and return it. Raises UnknownSession."""

        def change(db: sqlite3.Connection) -> int:
            row = fetch_one(
                db,
                "UPDATE sessions SET epoch = epoch + 1, worker = :worker WHERE id = :session"
                " RETURNING epoch",
                {"worker": worker, "session": session_id},
            )
            if row is None:
                raise UnknownSession(session_id)
            return int(row["epoch"])

        return await self._database.write(change, session_id, grows=False)
