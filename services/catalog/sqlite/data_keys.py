"""Wrapped data keys in the SQLite catalog, and the wrapping of its secret."""

import sqlite3
from collections.abc import Mapping

from services.catalog.sqlite.storage.database import Database
from services.catalog.sqlite.storage.queries import Row, fetch_all, fetch_one


class SqliteDataKeys:
    """`services.catalog.encryption.data_keys.DataKeyStore` in the table `data_keys`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def get(self, tenant: str) -> bytes | None:
        """Return a tenant's wrapped key, None if there is none."""
        return await self._database.read(lambda db: _read(db, tenant))

    async def get_all(self) -> Mapping[str, bytes]:
        """Return all wrapped keys by tenant."""
        query = "SELECT tenant, wrapped FROM data_keys"
        rows = await self._database.read(lambda db: fetch_all(db, query))
        return {row["tenant"]: row["wrapped"] for row in rows}

    async def add(self, tenant: str, wrapped: bytes) -> bytes:
        """Store a tenant's key unless there is one; return the one that is stored now."""
        query = (
            "INSERT INTO data_keys (tenant, wrapped) VALUES (:tenant, :wrapped)"
            " ON CONFLICT (tenant) DO NOTHING"
        )

        def change(db: sqlite3.Connection) -> bytes:
            db.execute(query, {"tenant": tenant, "wrapped": wrapped})
            return _read(db, tenant) or wrapped

        return await self._database.write(change, "")

    async def replace(self, tenant: str, old: bytes, new: bytes) -> None:
        """Replace a wrapped key, unless it has changed or is gone."""
        query = "UPDATE data_keys SET wrapped = :new WHERE tenant = :tenant AND wrapped = :old"
        values = {"tenant": tenant, "old": old, "new": new}
        await self._write(query, values)

    async def delete(self, tenant: str) -> bool:
        """Delete a tenant's key; no byte of it stays in the file."""
        query = "DELETE FROM data_keys WHERE tenant = :tenant RETURNING tenant"

        def change(db: sqlite3.Connection) -> bool:
            return fetch_one(db, query, {"tenant": tenant}) is not None

        found = await self._database.write(change, "", grows=False)
        await self._database.forget_old_pages()
        return found

    async def replace_secret(self, new: bytes) -> None:
        """Store the catalog's secret as it is wrapped now."""
        await self._write("UPDATE catalog_id SET secret = :new", {"new": new})
        await self._database.forget_old_pages()

    async def _write(self, query: str, values: Row) -> None:
        def change(db: sqlite3.Connection) -> None:
            db.execute(query, values)

        await self._database.write(change, "", grows=False)


def _read(db: sqlite3.Connection, tenant: str) -> bytes | None:
    query = "SELECT wrapped FROM data_keys WHERE tenant = :tenant"
    row = fetch_one(db, query, {"tenant": tenant})
    return None if row is None else bytes(row["wrapped"])
