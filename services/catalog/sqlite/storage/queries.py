"""Queries that all parts of the SQLite catalog share: rows, epochs, and what tenants have."""

import sqlite3
from collections.abc import Mapping, Sequence

from kvrecall.domain.errors import StaleEpoch, UnknownSession
from services.catalog.quota import UNLIMITED, Countable, TenantLimits, TenantUse

Row = Mapping[str, object]
NO_VALUES: Row = {}


def fetch_one(db: sqlite3.Connection, query: str, values: Row = NO_VALUES) -> sqlite3.Row | None:
    """Return the first row of a query, if there is one."""
    rows = fetch_all(db, query, values)
    return rows[0] if rows else None


def fetch_all(db: sqlite3.Connection, query: str, values: Row = NO_VALUES) -> list[sqlite3.Row]:
    """Return all rows of a query."""
    return db.execute(query, values).fetchall()


def fetch_value(db: sqlite3.Connection, query: str, values: Row = NO_VALUES) -> int:
    """Return the integer of a query that has exactly one row and column."""
    row = fetch_one(db, query, values)
    assert row is not None, "an aggregate, a pragma or RETURNING after a change gives one row"
    return int(row[0])


def insert(db: sqlite3.Connection, table: str, rows: Sequence[Row]) -> None:
    """Insert rows, given as values by column name; all have the same columns."""
    if rows:
        db.executemany(build_insert(table, rows[0]), rows)


def build_insert(table: str, row: Row) -> str:
    """Build an INSERT with named columns and a named parameter for each."""
    columns = ", ".join(row)
    parameters = ", ".join(f":{name}" for name in row)
    return f"INSERT INTO {table} ({columns}) VALUES ({parameters})"


def require_session(db: sqlite3.Connection, session_id: str) -> int:
    """Return the session's epoch. Raises UnknownSession."""
    row = fetch_one(db, "SELECT epoch FROM sessions WHERE id = :session", {"session": session_id})
    if row is None:
        raise UnknownSession(session_id)
    return int(row["epoch"])


def fence(db: sqlite3.Connection, session_id: str, epoch: int) -> None:
    """Refuse a write under an old epoch. Raises UnknownSession, StaleEpoch."""
    current = require_session(db, session_id)
    if current != epoch:
        raise build_stale_epoch(session_id, current, epoch)


def build_stale_epoch(session_id: str, current: int, epoch: int | str) -> StaleEpoch:
    """Build the error for a write under another epoch than the current one."""
    return StaleEpoch(
        f"session {session_id!r} is at epoch {current}, not {epoch}: another process took it over"
    )


def read_use(db: sqlite3.Connection, tenant: str) -> TenantUse:
    """Return what a tenant has."""
    query = "SELECT sessions, conversations, tokens, bytes FROM tenants WHERE tenant = :tenant"
    row = fetch_one(db, query, {"tenant": tenant})
    return TenantUse() if row is None else TenantUse(*row)


def check_use(db: sqlite3.Connection, tenant: str, limits: TenantLimits, *grown: Countable) -> None:
    """Raise QuotaExceeded, which undoes the transaction, if a tenant has too much of what has `grown`."""
    if limits != UNLIMITED:
        limits.check(read_use(db, tenant), grown)


def check_session_use(
    db: sqlite3.Connection, session_id: str, limits: TenantLimits, *grown: Countable
) -> None:
    """Raise QuotaExceeded, as `check_use`, for the tenant of a session."""
    if limits == UNLIMITED:
        return
    query = "SELECT tenant FROM sessions WHERE id = :session"
    row = fetch_one(db, query, {"session": session_id})
    if row is not None:
        check_use(db, row["tenant"], limits, *grown)
