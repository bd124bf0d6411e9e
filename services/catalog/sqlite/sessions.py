"""Sessions in the SQLite catalog: new ones, forks and sessions from elsewhere."""

import sqlite3
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal

from kvrecall.domain.errors import CatalogError, UnknownSession, UnknownTurn
from kvrecall.domain.sessions.session import Session
from kvrecall.domain.sessions.state_machine import SessionState
from services.catalog.claims import Claims
from services.catalog.encryption.cipher import Cipher
from services.catalog.encryption.encryption import Encryption
from services.catalog.owners import Owners
from services.catalog.quota import UNLIMITED, TenantLimits, TenantUse
from services.catalog.records import (
    BuildCommit,
    EpisodeSet,
    ForkCommit,
    IdempotencyRecord,
    SegmentsCommit,
    SessionDump,
    SessionPage,
)
from services.catalog.serialization import unseal
from services.catalog.sqlite import episodes, mapping, tool_calls
from services.catalog.sqlite.idempotency import SqliteIdempotency
from services.catalog.sqlite.memories import add_member
from services.catalog.sqlite.pages import drop_pages
from services.catalog.sqlite.session_rows import (
    add_session,
    count_by_state,
    count_sessions,
    open_state,
    read_page,
    read_session,
)
from services.catalog.sqlite.storage.database import Database
from services.catalog.sqlite.storage.queries import (
    Row,
    check_use,
    fetch_all,
    fetch_one,
    insert,
    read_use,
)
from services.catalog.sqlite.storage.reader import SnapshotReader

# The number of ids of one query: others wait for the connection meanwhile.
_IDS_AT_ONCE = 2000
_TABLES_OF_CALLS = ("tool_calls", "tool_output")
# Tables that a fork copies only at its parent's last turn.
_TABLES_AT_LAST_TURN = ("repairs", "episode_sets", "segments", "episodes", "built_episodes")


class SqliteSessions:
    """Sessions, from their creation to their deletion."""

    def __init__(
        self,
        database: Database,
        reader: SnapshotReader,
        idempotency: SqliteIdempotency,
        claims: Claims,
        encryption: Encryption,
        owners: Owners,
    ) -> None:
        self._database = database
        self._reader = reader
        self._idempotency = idempotency
        self._claims = claims
        self._encryption = encryption
        self._owners = owners

    async def create(
        self,
        session: Session,
        worker_state: bytes,
        record: IdempotencyRecord | None,
        limits: TenantLimits = UNLIMITED,
    ) -> None:
        """Add a session. Raises QuotaExceeded."""
        cipher = await self._encryption.tenants.to_write(session.settings.tenant)
        sealed = await self._idempotency.seal(record)

        def change(db: sqlite3.Connection) -> None:
            add_session(db, session, worker_state, self._database.now(), cipher)
            add_member(db, session, self._encryption)
            self._idempotency.store(db, sealed, created=session.id)
            check_use(db, session.settings.tenant, limits, "sessions", "tokens", "bytes")

        await self._database.write(change, session.id)

    async def get(self, session_id: str, tenant: str | None = None) -> Session:
        """Return the session as last committed, if it is the tenant's. Raises UnknownSession."""

        async def read() -> Session:
            # Of the tenant that asks: another one's session takes the same time as none.
            by_tenant = self._encryption.tenants.to_read
            by_session = self._encryption.sessions.to_read
            cipher = await (by_session(session_id) if tenant is None else by_tenant(tenant))
            return await self._reader.read(lambda db: read_session(db, session_id, cipher, tenant))

        return await self._database.cache.get(session_id, read, tenant)

    async def get_worker_state(self, session_id: str) -> bytes:
        """Return the serialized pb.SessionState. Raises UnknownSession."""
        cipher = await self._encryption.sessions.to_read(session_id)
        return await self._read_column(
            session_id, "state", lambda sealed: open_state(session_id, sealed, cipher)
        )

    async def get_page_ids(self, session_id: str) -> bytes:
        """Return the ids of the session's pages, joined. Raises UnknownSession."""
        return await self._read_column(session_id, "page_ids", unseal)

    async def get_page(self, limit: int, cursor: str | None, tenant: str = "") -> SessionPage:
        """Return up to `limit` sessions of a tenant, newest first. Raises InvalidRequest."""
        cipher = await self._encryption.tenants.to_read(tenant)
        return await self._reader.read(lambda db: read_page(db, limit, cursor, tenant, cipher))

    async def get_ids(self) -> list[str]:
        """Return the ids of all sessions, oldest first."""
        query = (
            "SELECT id, created_at FROM sessions WHERE (created_at, id) > (:created_at, :id)"
            " ORDER BY created_at, id LIMIT :limit"
        )
        ids: list[str] = []
        after: Row = {"created_at": float("-inf"), "id": "", "limit": _IDS_AT_ONCE}
        while True:
            rows = await self._database.read(partial(fetch_all, query=query, values=after))
            ids += [row["id"] for row in rows]
            if len(rows) < _IDS_AT_ONCE:
                return ids
            after = {**rows[-1], "limit": _IDS_AT_ONCE}

    async def get_use(self, tenant: str) -> TenantUse:
        """Return what the tenant has."""
        return await self._reader.read(lambda db: read_use(db, tenant))

    async def count(self, tenant: str) -> int:
        """Return the number of the tenant's sessions."""
        return await self._reader.read(lambda db: count_sessions(db, tenant))

    async def count_by_state(self) -> dict[SessionState, int]:
        """Count the idle and the paused sessions of all tenants."""
        return await self._reader.read(count_by_state)

    async def fork(
        self,
        commit: ForkCommit,
        record: IdempotencyRecord | None,
        limits: TenantLimits = UNLIMITED,
    ) -> None:
        """Add a session that starts from another. Raises UnknownSession, UnknownTurn, QuotaExceeded."""
        cipher = await self._encryption.tenants.to_write(commit.session.settings.tenant)
        sealed = await self._idempotency.seal(record)

        def change(db: sqlite3.Connection) -> None:
            _fork(db, commit, self._database.now(), cipher)
            add_member(db, commit.session, self._encryption)
            self._idempotency.store(db, sealed, created=commit.session.id)
            tenant = commit.session.settings.tenant
            check_use(db, tenant, limits, "sessions", "tokens", "bytes")

        await self._database.write(change, commit.session.id)

    async def restore(self, dump: SessionDump) -> None:
        """Add a session from another catalog. Raises CatalogError when its id is taken."""
        cipher = await self._encryption.tenants.to_write(dump.session.settings.tenant)

        def change(db: sqlite3.Connection) -> None:
            _restore(db, dump, self._database.now(), cipher)
            add_member(db, dump.session, self._encryption)

        await self._database.write(change)

    async def delete(self, session_id: str, record: IdempotencyRecord | None) -> None:
        """Delete the session; its pages may be dead then. Raises UnknownSession."""

        def change(db: sqlite3.Connection) -> None:
            query = "DELETE FROM sessions WHERE id = :session RETURNING last_page"
            deleted = fetch_one(db, query, {"session": session_id})
            if deleted is None:
                raise UnknownSession(session_id)
            drop_pages(db, deleted["last_page"])
            self._idempotency.store(db, record)

        await self._database.write(change, session_id, grows=False)
        self._claims.discard(session_id)
        self._owners.forget(session_id)

    async def _read_column(
        self,
        session_id: str,
        column: Literal["state", "page_ids"],
        open_sealed: Callable[[bytes], bytes],
    ) -> bytes:
        query = f"SELECT {column} FROM worker_states WHERE session = :session"

        def read(db: sqlite3.Connection) -> bytes:
            row = fetch_one(db, query, {"session": session_id})
            if row is None:
                raise UnknownSession(session_id)
            return open_sealed(row[column])

        return await self._database.read(read)


def _fork(db: sqlite3.Connection, commit: ForkCommit, now: float, cipher: Cipher) -> None:
    """Add the child, copying rows within the database. Raises UnknownSession, UnknownTurn."""
    parent = commit.parent
    child = commit.session.id
    turns = commit.turns
    query = "SELECT turns FROM sessions WHERE id = :parent"
    row = fetch_one(db, query, {"parent": parent})
    if row is None:
        raise UnknownSession(parent)
    if not 0 <= turns <= row["turns"]:
        raise UnknownTurn(parent, turns)
    add_session(db, commit.session, commit.worker_state, now, cipher, commit.page_ids)
    _copy(db, "turns", commit, "number <= :turns")
    for table in _TABLES_OF_CALLS:
        _copy(db, table, commit, "turn < :turns")
    if turns < row["turns"]:
        tool_calls.copy_pause(db, parent, child, turns, now, cipher)
        return
    for table in _TABLES_OF_CALLS:
        _copy(db, table, commit, "turn = :turns")
    for table in _TABLES_AT_LAST_TURN:
        _copy(db, table, commit, "true")


def _copy(db: sqlite3.Connection, table: str, commit: ForkCommit, where: str) -> None:
    """Copy rows of a table with a column `session` from the parent to the child."""
    query = "SELECT name FROM pragma_table_info(:table) WHERE name <> 'session'"
    columns = ", ".join(row["name"] for row in fetch_all(db, query, {"table": table}))
    db.execute(
        f"INSERT INTO {table} (session, {columns}) SELECT :child, {columns} FROM {table}"
        f" WHERE session = :parent AND {where}",
        {"child": commit.session.id, "parent": commit.parent, "turns": commit.turns},
    )


def _restore(db: sqlite3.Connection, dump: SessionDump, now: float, cipher: Cipher) -> None:
    """Add a session from another catalog. Raises CatalogError when its id is taken."""
    session_id = dump.session.id
    query = "SELECT 1 FROM sessions WHERE id = :session"
    if fetch_one(db, query, {"session": session_id}) is not None:
        raise CatalogError(f"there is a session {session_id!r} already")
    add_session(db, dump.session, dump.worker_state, now, cipher, dump.page_ids)
    insert(db, "turns", [mapping.to_turn_row(turn, cipher) for turn in dump.turns])
    tool_calls.add_calls(db, session_id, dump.calls, cipher)
    for call, pieces in dump.pieces.items():
        tool_calls.add_pieces(db, session_id, call, pieces, cipher)
    repairs = [mapping.to_repair_row(session_id, record, cipher) for record in dump.repairs]
    insert(db, "repairs", repairs)
    if dump.episodes != EpisodeSet():
        _restore_episodes(db, dump, cipher)


def _restore_episodes(db: sqlite3.Connection, dump: SessionDump, cipher: Cipher) -> None:
    session_id = dump.session.id
    without_episodes = replace(dump.episodes, episodes=())
    episodes.add_segments(db, session_id, SegmentsCommit(dump.segments, without_episodes), cipher)
    labels = tuple(segment.label for segment in dump.segments)
    build = BuildCommit(dump.episodes, dump.built, labels)
    episodes.replace_episodes(db, session_id, build, cipher)
    episodes.count_match(db, session_id, "", dump.episodes.active)
