"""What tenants have, in the SQLite catalog. The functions run in the caller's transaction."""

import sqlite3

from services.catalog.quota import UNLIMITED, Countable, TenantLimits, TenantUse
from services.catalog.sqlite.queries import fetch_one


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
