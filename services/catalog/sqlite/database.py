"""The file of the SQLite catalog: made, or checked to be one of this version."""

import asyncio
import sqlite3
from pathlib import Path

import aiosqlite

from kvrecall.domain.errors import CatalogError, CatalogVersion
from services.catalog.sqlite.schema import APPLICATION_ID, PRAGMAS, SCHEMA_VERSION, TABLES
from services.catalog.sqlite.statements import one


async def open_file(path: Path) -> aiosqlite.Connection:
    """A connection to the catalog at `path`, which is made if there is none.

    Raises CatalogVersion for a file of another version, CatalogError when it cannot be opened or is no catalog.
    """
    try:
        await asyncio.to_thread(_check_place, path)
        connection = await aiosqlite.connect(path, isolation_level=None)
    except (OSError, sqlite3.Error) as error:
        raise CatalogError(f"the catalog {path} cannot be opened: {error}") from error
    try:
        await _prepare(connection, path)
    except BaseException:
        await connection.close()
        raise
    return connection


def _check_place(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory; name a file in it")


async def _prepare(connection: aiosqlite.Connection, path: Path) -> None:
    connection.row_factory = sqlite3.Row
    try:
        for pragma in PRAGMAS:
            await connection.execute(pragma)
        await connection.execute("BEGIN IMMEDIATE")
        await _create_or_check(connection, path)
        await connection.execute("COMMIT")
    except sqlite3.Error as error:
        raise CatalogError(f"the catalog {path} cannot be opened: {error}") from error


async def _create_or_check(connection: aiosqlite.Connection, path: Path) -> None:
    version = await one(connection, "PRAGMA user_version", ())
    application = await one(connection, "PRAGMA application_id", ())
    tables = await one(connection, "SELECT count(*) AS n FROM sqlite_master", ())
    assert version is not None
    assert application is not None
    assert tables is not None
    if tables["n"] == 0:
        for statement in TABLES.split(";"):
            await connection.execute(statement)
        await connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        await connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    elif application["application_id"] != APPLICATION_ID:
        raise CatalogError(
            f"{path} is a database of another program; give the catalog a file of its own"
        )
    elif version["user_version"] != SCHEMA_VERSION:
        raise CatalogVersion(
            f"{path} has catalog version {version['user_version']}, this kvrecall reads version {SCHEMA_VERSION}; "
            "run the kvrecall that wrote it, or start with another data directory"
        )
