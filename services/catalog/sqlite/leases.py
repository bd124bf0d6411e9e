"""Claims and epochs of the SQLite catalog.

One process owns the file, so claims are kept in its memory. That process may use several workers.
"""

import aiosqlite

from kvrecall.domain.errors import UnknownSession
from services.catalog.claims import Claims
from services.catalog.records import Lease
from services.catalog.sqlite.database import Database
from services.catalog.sqlite.queries import fetch_one


class SqliteLeases:
    """Claims in memory, epochs in the file."""

    def __init__(self, database: Database, claims: Claims) -> None:
        self._database = database
        self._claims = claims

    async def claim(self, session_id: str, holder: str, seconds: float) -> Lease:
        """Claim the session, or extend the holder's claim. Raises SessionBusy, UnknownSession."""
        query = "SELECT epoch, worker FROM sessions WHERE id = :session"
        row = await self._database.read(lambda db: fetch_one(db, query, {"session": session_id}))
        if row is None:
            raise UnknownSession(session_id)
        self._claims.acquire(session_id, holder, seconds)
        return Lease(row["epoch"], row["worker"])

    async def release(self, session_id: str, holder: str) -> None:
        """Release the holder's claim."""
        self._claims.release(session_id, holder)

    async def take_over(self, session_id: str, worker: str) -> int:
        """Start a new epoch and return it. Raises UnknownSession."""

        async def change(db: aiosqlite.Connection) -> int:
            row = await fetch_one(
                db,
                "UPDATE sessions SET epoch = epoch + 1, worker = :worker WHERE id = :session"
                " RETURNING epoch",
                {"worker": worker, "session": session_id},
            )
            if row is None:
                raise UnknownSession(session_id)
            return int(row["epoch"])

        return await self._database.write(change, session_id)
