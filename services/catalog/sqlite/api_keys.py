"""API keys in the SQLite catalog."""

import json
import sqlite3

from kvrecall.domain.errors import CatalogError
from services.catalog.api_keys import KeyRecord
from services.catalog.sqlite.storage.database import Database
from services.catalog.sqlite.storage.queries import build_insert, fetch_all, fetch_one, fetch_value


class SqliteApiKeys:
    """The keys of all tenants. Nothing of them is cached, so another process may change them."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(self, record: KeyRecord) -> None:
        """Add a key. Raises CatalogError when its id is taken."""
        row = {**vars(record), "scopes": json.dumps(record.scopes)}

        def change(db: sqlite3.Connection) -> None:
            try:
                db.execute(build_insert("api_keys", row), row)
            except sqlite3.IntegrityError as error:
                raise CatalogError(f"there is a key {record.id!r} already") from error

        await self._database.write(change, "")

    async def get(self, key_id: str) -> KeyRecord | None:
        """Return a key, None if there is none of that id."""
        query = "SELECT * FROM api_keys WHERE id = :id"
        row = await self._database.read(lambda db: fetch_one(db, query, {"id": key_id}))
        return None if row is None else _to_record(row)

    async def get_all(self) -> list[KeyRecord]:
        """Return all keys, oldest first."""
        query = "SELECT * FROM api_keys ORDER BY created_at, id"
        rows = await self._database.read(lambda db: fetch_all(db, query))
        return [_to_record(row) for row in rows]

    async def exist(self) -> bool:
        """Return whether any key was ever made."""
        query = "SELECT EXISTS (SELECT 1 FROM api_keys)"
        return bool(await self._database.read(lambda db: fetch_value(db, query)))

    async def revoke(self, key_id: str, at: float) -> bool:
        """Revoke a key, and return whether there is one."""
        query = (
            "UPDATE api_keys SET revoked_at = coalesce(revoked_at, :at) WHERE id = :id RETURNING id"
        )
        values = {"id": key_id, "at": at}
        found = await self._database.write(lambda db: fetch_one(db, query, values), "", grows=False)
        return found is not None

    async def touch(self, key_id: str, at: float) -> None:
        """Note the time of a key's last use."""
        query = "UPDATE api_keys SET last_used_at = :at WHERE id = :id"

        def change(db: sqlite3.Connection) -> None:
            db.execute(query, {"id": key_id, "at": at})

        await self._database.write(change, "", grows=False)


def _to_record(row: sqlite3.Row) -> KeyRecord:
    values = dict(row)
    return KeyRecord(**{**values, "scopes": tuple(json.loads(values["scopes"]))})
