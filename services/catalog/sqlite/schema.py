"""The schema of the SQLite catalog: version, statements and migrations."""

import sqlite3
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from types import MappingProxyType

# Marks a SQLite file as a catalog: "kvrc" in ASCII.
APPLICATION_ID = 0x6B767263

# The version that this program writes.
SCHEMA_VERSION = 15

# By the version they start from: the migration to the next version.
MIGRATIONS: Mapping[int, str] = MappingProxyType(
    {
        5: "0006_standard_terms.sql",
        6: "0007_bounded_costs.sql",
        7: "0008_catalog_id.sql",
        8: "0009_commit_points.sql",
        9: "0010_creations.sql",
        10: "0011_histories.sql",
        11: "0012_expiry_and_states.sql",
        12: "0013_api_keys.sql",
        13: "0014_responses.sql",
        14: "0015_tenant_bytes.sql",
    }
)

PRAGMAS = (
    "PRAGMA journal_mode=WAL",
    "PRAGMA synchronous=FULL",
    "PRAGMA foreign_keys=ON",
)


@cache
def load_schema() -> tuple[str, ...]:
    """Return the statements that create an empty catalog of the current version."""
    return _load("schema.sql")


@cache
def load_migration(version: int) -> tuple[str, ...]:
    """Return the statements that lead from `version` to the next one."""
    return _load(f"migrations/{MIGRATIONS[version]}")


def _load(name: str) -> tuple[str, ...]:
    script = files("services.catalog.sqlite").joinpath(name).read_text("utf-8")
    return tuple(_split_statements(script))


def _split_statements(script: str) -> Iterator[str]:
    """Split a script; `executescript` would do it too, but commits the open transaction first."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
