"""The catalog on SQLite: one file with a write-ahead log, each commit synced before it returns."""

from functools import partial
from pathlib import Path

from services.catalog.claims import Claims
from services.catalog.encryption.encryption import Encryption
from services.catalog.encryption.keyring import Keyring
from services.catalog.encryption.opening import (
    from_stored_secret,
    is_current_secret,
    open_encryption,
    to_stored_secret,
)
from services.catalog.owners import Owners
from services.catalog.sqlite.api_keys import SqliteApiKeys
from services.catalog.sqlite.data_keys import SqliteDataKeys
from services.catalog.sqlite.episodes import SqliteEpisodes
from services.catalog.sqlite.expiry import SqliteExpiry
from services.catalog.sqlite.histories import SqliteHistories
from services.catalog.sqlite.idempotency import SqliteIdempotency
from services.catalog.sqlite.leases import SqliteLeases
from services.catalog.sqlite.memories import SqliteMemories
from services.catalog.sqlite.pages import SqlitePages
from services.catalog.sqlite.repairs import SqliteRepairs
from services.catalog.sqlite.responses import SqliteConversations, SqliteResponses
from services.catalog.sqlite.sessions import SqliteSessions
from services.catalog.sqlite.storage.database import Database, open_database
from services.catalog.sqlite.storage.queries import fetch_one
from services.catalog.sqlite.storage.reader import SnapshotReader
from services.catalog.sqlite.tool_calls import SqliteToolCalls
from services.catalog.sqlite.turns import SqliteTurns


class SqliteCatalog:
    """A `Catalog` in one SQLite file, which one process uses at a time."""

    def __init__(
        self,
        database: Database,
        reader: SnapshotReader,
        secret: bytes,
        owners: Owners,
        encryption: Encryption,
    ) -> None:
        """`secret`: the catalog's, unwrapped. `owners`: the tenants of sessions."""
        claims = Claims()
        self.id = database.identity.id
        self.secret = secret
        self._database = database
        self._reader = reader
        self.data_keys = encryption.keys
        self.idempotency = SqliteIdempotency(database, encryption)
        self.sessions = SqliteSessions(
            database, reader, self.idempotency, claims, encryption, owners
        )
        self.leases = SqliteLeases(database, reader, claims, encryption)
        self.turns = SqliteTurns(database, self.idempotency, encryption)
        self.histories = SqliteHistories(database, encryption)
        self.responses = SqliteResponses(database, encryption)
        self.conversations = SqliteConversations(database, self.idempotency, encryption)
        self.expiry = SqliteExpiry(database, reader, encryption)
        self.memories = SqliteMemories(reader, encryption)
        self.tool_calls = SqliteToolCalls(database, self.idempotency, encryption)
        self.repairs = SqliteRepairs(database, encryption)
        self.episodes = SqliteEpisodes(database, encryption)
        self.pages = SqlitePages(database)
        self.api_keys = SqliteApiKeys(database)

    @classmethod
    async def open(
        cls, path: Path, reserve_bytes: int = 0, keyring: Keyring | None = None
    ) -> "SqliteCatalog":
        """Open the catalog at `path`; a missing file is created.

        `reserve_bytes` of its disk are left to deletions. With a `keyring` values are encrypted.
        Raises CatalogVersion for another version, CatalogError when another process
        uses the file, or it cannot be opened, is no catalog, or is encrypted with other keys.
        """
        database = await open_database(path, reserve_bytes, keyring)
        reader = SnapshotReader(path, database.identity)
        try:
            secret = await _open_secret(database, keyring)
            owners = Owners(partial(_read_tenant, reader, "sessions"))
            encryption = await open_encryption(
                keyring,
                secret,
                SqliteDataKeys(database),
                owners,
                partial(_read_tenant, reader, "conversations"),
            )
        except BaseException:
            await reader.close()
            await database.close()
            raise
        return cls(database, reader, secret, owners, encryption)

    async def has_room(self) -> bool:
        """Return whether more may be stored. Raises CatalogError."""
        return await self._database.has_room()

    async def close(self) -> None:
        """Finish running reads and writes and close the file."""
        await self._reader.close()
        await self._database.close()


async def _open_secret(database: Database, keyring: Keyring | None) -> bytes:
    """Return the catalog's secret, which is wrapped by the operator's current key from now on."""
    stored = database.identity.secret
    secret = from_stored_secret(keyring, stored)
    if not is_current_secret(keyring, stored):
        await SqliteDataKeys(database).replace_secret(to_stored_secret(keyring, secret))
    return secret


async def _read_tenant(reader: SnapshotReader, table: str, id: str) -> str | None:
    """Read the tenant of a session or a conversation, None if there is none."""
    query = f"SELECT tenant FROM {table} WHERE id = :id"
    row = await reader.read(lambda db: fetch_one(db, query, {"id": id}))
    return None if row is None else row["tenant"]
