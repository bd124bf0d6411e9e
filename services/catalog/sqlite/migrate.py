"""Creation and migration of the SQLite catalog's file, each in one transaction."""

import json
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from kvrecall.domain.errors import CatalogError
from services.catalog import renames
from services.catalog.serialization import OUTPUT, seal
from services.catalog.sqlite.queries import fetch_value
from services.catalog.sqlite.schema import (
    APPLICATION_ID,
    MIGRATIONS,
    SCHEMA_VERSION,
    load_migration,
    load_schema,
)
from services.catalog.summaries import summarize_pieces
from services.catalog.versions import CatalogUpgrade, build_catalog_version

_FUNCTIONS = (
    renames.rename_in_outcome,
    renames.rename_in_repair,
    renames.rename_in_response,
)


def migrate(connection: sqlite3.Connection, path: Path) -> CatalogUpgrade:
    """Create the tables of a new file, or bring an older file to the current version.

    A file that is migrated is first copied to `get_backup_path`. Everything is one transaction:
    after a crash the file is as before. The caller holds the file's lock. Raises CatalogVersion for
    a version that cannot be read, CatalogError for another program's database.
    """
    connection.execute("BEGIN IMMEDIATE")
    found = read_version(connection, path)
    backup = None
    if found is None:
        _create(connection)
    elif found != SCHEMA_VERSION:
        backup = get_backup_path(path, found)
        _back_up(path, backup)
        _run_migrations(connection, found)
    connection.execute("COMMIT")
    return CatalogUpgrade(str(path), found, SCHEMA_VERSION, backup)


def get_backup_path(path: Path, version: int) -> Path:
    """Return the name of the copy that is made before a file of `version` is migrated."""
    return path.with_name(f"{path.name}.v{version}-backup")


def read_version(connection: sqlite3.Connection, path: Path) -> int | None:
    """Return the file's schema version, None for an empty file. Raises as `migrate`."""
    if fetch_value(connection, "SELECT count(*) FROM sqlite_master") == 0:
        return None
    if fetch_value(connection, "PRAGMA application_id") != APPLICATION_ID:
        raise CatalogError(
            f"{path} is a database of another program; give the catalog a file of its own"
        )
    found = fetch_value(connection, "PRAGMA user_version")
    if found != SCHEMA_VERSION and found not in MIGRATIONS:
        raise build_catalog_version(str(path), str(found), SCHEMA_VERSION, min(MIGRATIONS))
    return found


def _create(connection: sqlite3.Connection) -> None:
    for statement in load_schema():
        connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def _run_migrations(connection: sqlite3.Connection, found: int) -> None:
    connection.create_function("summarize_pieces", 2, _summarize_pieces, deterministic=True)
    for function in _FUNCTIONS:
        connection.create_function(function.__name__, 1, _on_text(function), deterministic=True)
    connection.create_function(seal.__name__, -1, seal, deterministic=True)
    for version in range(found, SCHEMA_VERSION):
        for statement in load_migration(version):
            connection.execute(statement)
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def _on_text(change: renames.Change) -> Callable[[str], str]:
    """Turn a change of a JSON value into one of its text."""

    def run(text: str) -> str:
        return json.dumps(change(json.loads(text)), ensure_ascii=False, separators=(",", ":"))

    return run


def _summarize_pieces(pieces: str, delta_due: int) -> str:
    texts = {int(index): text for index, text in json.loads(pieces).items()}
    return OUTPUT.dump_json(summarize_pieces(texts, delta_due)).decode()


def _back_up(path: Path, backup: Path) -> None:
    """Copy the last committed state of a database; the copy appears whole or not at all."""
    part = backup.with_name(f".{backup.name}.{os.getpid()}.part")
    part.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(part)) as copy:
        source.backup(copy)
    part.replace(backup)
    folder = os.open(backup.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
