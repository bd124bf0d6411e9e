"""The schema of the SQLite catalog's file: its version, its creation and the refusal of others."""

import secrets
import sqlite3
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path
from uuid import uuid4

from kvrecall.domain.errors import CatalogError
from kvrecall.domain.page_ids import KEY_BYTES
from services.catalog.encryption.keyring import Keyring
from services.catalog.encryption.opening import to_stored_secret
from services.catalog.sqlite.storage.queries import fetch_value
from services.catalog.versions import build_catalog_version

# Marks a SQLite file as a catalog: "kvrc" in ASCII.
APPLICATION_ID = 0x6B767263

# The version that this program writes and reads.
SCHEMA_VERSION = 20

PRAGMAS = (
    "PRAGMA journal_mode=WAL",
    "PRAGMA synchronous=FULL",
    "PRAGMA foreign_keys=ON",
    # What is deleted is overwritten where that costs no writing, a tenant's data key for example.
    "PRAGMA secure_delete=FAST",
)


def create_or_check(
    connection: sqlite3.Connection, path: Path, keyring: Keyring | None = None
) -> None:
    """Create the tables of an empty file, in one transaction; a file of another version is refused.

    A new catalog's secret is wrapped, if there is a keyring. The caller holds the file's lock. Raises
    CatalogVersion for another version, CatalogError for another program's database.
    """
    connection.execute("BEGIN IMMEDIATE")
    if not is_catalog(connection, path):
        for statement in load_schema():
            connection.execute(statement)
        secret = to_stored_secret(keyring, secrets.token_bytes(KEY_BYTES))
        connection.execute(
            "INSERT INTO catalog_id (id, secret) VALUES (?, ?)", (uuid4().hex, secret)
        )
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    connection.execute("COMMIT")


def is_catalog(connection: sqlite3.Connection, path: Path) -> bool:
    """Check that a file is a catalog of this version; False if it is empty.

    Raises as `create_or_check`.
    """
    if fetch_value(connection, "SELECT count(*) FROM sqlite_master") == 0:
        return False
    if fetch_value(connection, "PRAGMA application_id") != APPLICATION_ID:
        raise CatalogError(
            f"{path} is a database of another program; give the catalog a file of its own"
        )
    found = fetch_value(connection, "PRAGMA user_version")
    if found != SCHEMA_VERSION:
        raise build_catalog_version(str(path), str(found), SCHEMA_VERSION)
    return True


@cache
def load_schema() -> tuple[str, ...]:
    """Return the statements that create an empty catalog."""
    script = files("services.catalog.sqlite.storage").joinpath("schema.sql").read_text("utf-8")
    return tuple(_split_statements(script))


def _split_statements(script: str) -> Iterator[str]:
    """Split a script; `executescript` would do it too, but commits the open transaction first."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
