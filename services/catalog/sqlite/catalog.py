"""The catalog on SQLite: one file with a write-ahead log, each commit synced before it returns."""

from pathlib import Path

from services.catalog.claims import Claims
from services.catalog.sqlite.api_keys import SqliteApiKeys
from services.catalog.sqlite.episodes import SqliteEpisodes
from services.catalog.sqlite.expiry import SqliteExpiry
from services.catalog.sqlite.histories import SqliteHistories
from services.catalog.sqlite.idempotency import SqliteIdempotency
from services.catalog.sqlite.leases import SqliteLeases
from services.catalog.sqlite.pages import SqlitePages
from services.catalog.sqlite.repairs import SqliteRepairs
from services.catalog.sqlite.responses import SqliteConversations, SqliteResponses
from services.catalog.sqlite.sessions import SqliteSessions
from services.catalog.sqlite.storage.database import Database, open_database
from services.catalog.sqlite.storage.reader import SnapshotReader
from services.catalog.sqlite.tool_calls import SqliteToolCalls
from services.catalog.sqlite.turns import SqliteTurns


class SqliteCatalog:
    """A `Catalog` in one SQLite file, which one process uses at a time."""

    def __init__(self, database: Database, reader: SnapshotReader) -> None:
        claims = Claims()
        self.id = database.identity.id
        self.secret = database.identity.secret
        self._database = database
        self._reader = reader
        self.idempotency = SqliteIdempotency(database)
        self.sessions = SqliteSessions(database, reader, self.idempotency, claims)
        self.leases = SqliteLeases(database, reader, claims)
        self.turns = SqliteTurns(database, self.idempotency)
        self.histories = SqliteHistories(database)
        self.responses = SqliteResponses(database)
        self.conversations = SqliteConversations(database, self.idempotency)
        self.expiry = SqliteExpiry(database, reader)
        self.tool_calls = SqliteToolCalls(database, self.idempotency)
        self.repairs = SqliteRepairs(database)
        self.episodes = SqliteEpisodes(database)
        self.pages = SqlitePages(database)
        self.api_keys = SqliteApiKeys(database)

    @classmethod
    async def open(cls, path: Path, reserve_bytes: int = 0) -> "SqliteCatalog":
        """Open the catalog at `path`; a missing file is created.

        `reserve_bytes` of its disk are left to deletions.
        Raises CatalogVersion for another version, CatalogError when another process
        uses the file, or it cannot be opened or is no catalog.
        """
        database = await open_database(path, reserve_bytes)
        return cls(database, SnapshotReader(path, database.identity))

    async def has_room(self) -> bool:
        """Return whether more may be stored. Raises CatalogError."""
        return await self._database.has_room()

    async def close(self) -> None:
        """Finish running reads and writes and close the file."""
        await self._reader.close()
        await self._database.close()
