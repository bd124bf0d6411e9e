"""Sessions in the SQLite catalog."""

import sqlite3

import aiosqlite

from kvrecall.domain.commit_points import CommitPoint
from kvrecall.domain.errors import UnknownSession
from kvrecall.domain.session import Session
from services.catalog.claims import Claims
from services.catalog.records import (
    ForkCommit,
    IdempotencyRecord,
    OrphanedPages,
    SessionDump,
    SessionPage,
)
from services.catalog.serialization import decode_cursor, encode_cursor
from services.catalog.sqlite import copies, mapping, page_refs, repairs, tool_calls
from services.catalog.sqlite.database import Database
from services.catalog.sqlite.idempotency import SqliteIdempotency
from services.catalog.sqlite.queries import fetch_all, fetch_one, fetch_value, require_session
from services.catalog.sqlite.session_rows import add_session


class SqliteSessions:
    """Sessions, from their creation to their deletion."""

    def __init__(self, database: Database, idempotency: SqliteIdempotency, claims: Claims) -> None:
        self._database = database
        self._idempotency = idempotency
        self._claims = claims

    async def create(
        self, session: Session, worker_state: bytes, record: IdempotencyRecord | None
    ) -> None:
        """Add a session."""

        async def change(db: aiosqlite.Connection) -> None:
            await add_session(db, session, worker_state)
            await self._idempotency.store(db, record, created=session.id)

        await self._database.write(change)

    async def get(self, session_id: str) -> Session:
        """Return the session as last committed. Raises UnknownSession."""
        return await self._database.read(lambda db: _read_session(db, session_id))

    async def get_worker_state(self, session_id: str) -> bytes:
        """Return the serialized pb.SessionState. Raises UnknownSession."""
        query = "SELECT state FROM worker_states WHERE session = :session"
        row = await self._database.read(lambda db: fetch_one(db, query, {"session": session_id}))
        if row is None:
            raise UnknownSession(session_id)
        return bytes(row["state"])

    async def get_history(self, session_id: str) -> tuple[CommitPoint, ...]:
        """Return the committed length at the end of each epoch. Raises UnknownSession."""
        query = "SELECT epoch, length FROM commit_points WHERE session = :session ORDER BY epoch"

        async def read(db: aiosqlite.Connection) -> tuple[CommitPoint, ...]:
            await require_session(db, session_id)
            rows = await fetch_all(db, query, {"session": session_id})
            return tuple(CommitPoint(row["epoch"], row["length"]) for row in rows)

        return await self._database.read(read)

    async def get_page(self, limit: int, cursor: str | None, tenant: str = "") -> SessionPage:
        """Return up to `limit` sessions of a tenant, newest first. Raises InvalidRequest."""
        after = "" if cursor is None else "AND (created_at, id) < (:created_at, :id)"
        bound = {} if cursor is None else _to_bound(cursor)
        query = (
            f"SELECT * FROM sessions WHERE tenant = :tenant {after}"
            " ORDER BY created_at DESC, id DESC LIMIT :limit"
        )

        async def read(db: aiosqlite.Connection) -> SessionPage:
            values = {"tenant": tenant, "limit": limit + 1} | bound
            rows = await fetch_all(db, query, values)
            sessions = tuple([await _read_whole_session(db, row) for row in rows[:limit]])
            return SessionPage(sessions, encode_cursor(sessions[-1]) if len(rows) > limit else None)

        return await self._database.read(read)

    async def get_ids(self) -> list[str]:
        """Return the ids of all sessions, oldest first."""
        query = "SELECT id FROM sessions ORDER BY created_at, id"
        return [row["id"] for row in await self._database.read(lambda db: fetch_all(db, query))]

    async def get_tenant_tokens(self, tenant: str) -> int:
        """Return the number of tokens in the tenant's sessions."""
        query = "SELECT coalesce(sum(length), 0) FROM sessions WHERE tenant = :tenant"
        return await self._database.read(lambda db: fetch_value(db, query, {"tenant": tenant}))

    async def fork(self, commit: ForkCommit, record: IdempotencyRecord | None) -> None:
        """Add a session that starts from another. Raises UnknownSession, UnknownTurn."""

        async def change(db: aiosqlite.Connection) -> None:
            await copies.fork(db, commit)
            await self._idempotency.store(db, record, created=commit.session.id)

        await self._database.write(change)

    async def restore(self, dump: SessionDump) -> None:
        """Add a session from another catalog. Raises CatalogError when its id is taken."""
        await self._database.write(lambda db: copies.restore(db, dump))

    async def delete(
        self, session_id: str, record: IdempotencyRecord | None
    ) -> list[OrphanedPages]:
        """Delete the session and return the orphaned pages. Raises UnknownSession."""

        async def change(db: aiosqlite.Connection) -> list[OrphanedPages]:
            orphaned = await page_refs.delete_session(db, session_id)
            await self._idempotency.store(db, record)
            return orphaned

        orphaned = await self._database.write(change)
        self._claims.discard(session_id)
        return orphaned


async def _read_session(db: aiosqlite.Connection, session_id: str) -> Session:
    row = await fetch_one(db, "SELECT * FROM sessions WHERE id = :session", {"session": session_id})
    if row is None:
        raise UnknownSession(session_id)
    return await _read_whole_session(db, row)


async def _read_whole_session(db: aiosqlite.Connection, row: sqlite3.Row) -> Session:
    calls = await tool_calls.read_open(db, row["id"])
    reports = await repairs.read_reports_since(db, row["id"], row["turns"])
    shared = await page_refs.read_refs(db, row["id"])
    return mapping.from_session_row(row, calls, reports, shared)


def _to_bound(cursor: str) -> dict[str, object]:
    created_at, session_id = decode_cursor(cursor)
    return {"created_at": created_at, "id": session_id}
