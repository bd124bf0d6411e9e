"""The catalog on SQLite: one file, write-ahead log, every commit synced to the disk before it is acknowledged."""

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiosqlite

from services import sqlite_episodes as episodes
from services import sqlite_pauses as pauses
from services import sqlite_rows as rows
from services.cancellation import unbroken
from services.catalog import (
    BuildCommit,
    EpisodeSet,
    IdempotencyKey,
    Remembered,
    RepairCommit,
    RepairRecord,
    SegmentRecord,
    SegmentsCommit,
    SessionPage,
    TurnCommit,
)
from services.errors import CatalogError, CatalogVersion, IdempotencyConflict, UnknownCall, UnknownSession
from services.sessions import PendingCall, Session, Turn
from services.sqlite_schema import APPLICATION_ID, PRAGMAS, SCHEMA_VERSION, TABLES
from services.sqlite_statements import check_session, every, fence, one

Write = Callable[[aiosqlite.Connection], Awaitable[None]]


class SqliteCatalog:
    """A `Catalog` in one SQLite file. Statements of one transaction are never mixed with another's."""

    def __init__(self, connection: aiosqlite.Connection, answers: int) -> None:
        self._connection = connection
        self._turn = asyncio.Lock()
        self._answers = answers

    @classmethod
    async def open(cls, path: Path, idempotency_records: int = 10_000) -> "SqliteCatalog":
        """Open or create the catalog at `path`, keeping at most that many idempotent answers.

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
        return cls(connection, idempotency_records)

    async def close(self) -> None:
        """Finish running writes and close the file."""
        async with self._turn:
            await self._connection.close()

    async def create(self, session: Session, worker_state: bytes, answer: Remembered | None) -> None:
        """See `Catalog.create`."""
        await unbroken(self._create(session, worker_state, answer))

    async def _create(self, session: Session, worker_state: bytes, answer: Remembered | None) -> None:
        async with self._transaction() as db:
            await db.execute("INSERT INTO sessions VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows.session_row(session))
            await db.execute("INSERT INTO worker_states VALUES (?, ?)", (session.id, worker_state))
            await self._remember(db, answer)

    async def session(self, session: str) -> Session:
        """See `Catalog.session`."""
        async with self._reading() as db:
            row = await one(db, "SELECT * FROM sessions WHERE id = ?", (session,))
            if row is None:
                raise UnknownSession(session)
            return await _session(db, row)

    async def worker_state(self, session: str) -> bytes:
        """See `Catalog.worker_state`."""
        async with self._reading() as db:
            row = await one(db, "SELECT state FROM worker_states WHERE session = ?", (session,))
        if row is None:
            raise UnknownSession(session)
        return bytes(row["state"])

    async def page(self, limit: int, cursor: str | None) -> SessionPage:
        """See `Catalog.page`."""
        where, bounds = "", tuple[object, ...]()
        if cursor is not None:
            where, bounds = "WHERE (created_at, id) < (?, ?)", rows.cursor_value(cursor)
        query = f"SELECT * FROM sessions {where} ORDER BY created_at DESC, id DESC LIMIT ?"
        async with self._reading() as db:
            found = await every(db, query, (*bounds, limit + 1))
            sessions = tuple([await _session(db, row) for row in found[:limit]])
        return SessionPage(sessions, rows.cursor_text(sessions[-1]) if len(found) > limit else None)

    async def session_ids(self) -> list[str]:
        """See `Catalog.session_ids`."""
        async with self._reading() as db:
            return [row["id"] for row in await every(db, "SELECT id FROM sessions ORDER BY created_at, id", ())]

    async def turns(self, session: str, after: int, limit: int) -> list[Turn]:
        """See `Catalog.turns`."""
        query = "SELECT * FROM turns WHERE session = ? AND number > ? ORDER BY number LIMIT ?"
        async with self._reading() as db:
            return [rows.turn_value(row) for row in await every(db, query, (session, after, limit))]

    async def token_ids(self, session: str) -> tuple[int, ...]:
        """See `Catalog.token_ids`."""
        query = "SELECT token_ids FROM turns WHERE session = ? ORDER BY number"
        async with self._reading() as db:
            await check_session(db, session)
            found = await every(db, query, (session,))
        return rows.token_values(b"".join(row["token_ids"] for row in found))

    async def repairs(self, session: str, limit: int) -> list[RepairRecord]:
        """See `Catalog.repairs`."""
        async with self._reading() as db:
            await check_session(db, session)
            return await pauses.read_repairs(db, session, limit)

    async def take_over(self, session: str) -> int:
        """See `Catalog.take_over`."""
        return await unbroken(self._take_over(session))

    async def _take_over(self, session: str) -> int:
        query = "UPDATE sessions SET epoch = epoch + 1 WHERE id = ? RETURNING epoch"
        async with self._transaction() as db:
            row = await one(db, query, (session,))
        if row is None:
            raise UnknownSession(session)
        return int(row["epoch"])

    async def commit_turn(self, commit: TurnCommit, epoch: int, answer: Remembered | None) -> None:
        """See `Catalog.commit_turn`."""
        await unbroken(self._commit_turn(commit, epoch, answer))

    async def _commit_turn(self, commit: TurnCommit, epoch: int, answer: Remembered | None) -> None:
        turn, outcome = commit.turn, commit.turn.outcome
        memory = rows.MEMORY.dump_json(outcome.memory).decode()
        output_due = 0 if commit.calls else outcome.output_tokens
        async with self._transaction() as db:
            await fence(db, turn.session, epoch)
            await db.execute("INSERT INTO turns VALUES (?, ?, ?, ?, ?, ?)", rows.turn_row(turn))
            await db.execute(
                "UPDATE sessions SET turns = ?, memory = ?, updated_at = ?, output_due = ? WHERE id = ?",
                (turn.number, memory, time.time(), output_due, turn.session),
            )
            await _replace_state(db, turn.session, commit.worker_state)
            await episodes.count_match(db, turn.session, commit.matched, commit.active)
            await pauses.end_pause(db, commit)
            await pauses.begin_pause(db, turn, commit.calls)
            if outcome.own_repair is not None:
                await pauses.add_repair(db, turn.session, turn.number, outcome.own_repair, commit.repaired)
            await self._remember(db, answer)

    async def commit_repair(self, session: str, commit: RepairCommit, epoch: int) -> None:
        """See `Catalog.commit_repair`."""
        await unbroken(self._commit_repair(session, commit, epoch))

    async def _commit_repair(self, session: str, commit: RepairCommit, epoch: int) -> None:
        async with self._transaction() as db:
            await fence(db, session, epoch)
            await pauses.mark_repaired(db, session, commit)
            if commit.worker_state is not None:
                await _replace_state(db, session, commit.worker_state)
            if commit.memory is not None:
                memory = rows.MEMORY.dump_json(commit.memory).decode()
                await db.execute("UPDATE sessions SET memory = ? WHERE id = ?", (memory, session))
            if commit.report is not None:
                turns = await one(db, "SELECT turns FROM sessions WHERE id = ?", (session,))
                assert turns is not None, "the fence has found the session"
                await pauses.add_repair(db, session, turns["turns"] + 1, commit.report, commit.details)

    async def call(self, session: str, call: str) -> PendingCall:
        """See `Catalog.call`."""
        query = "SELECT * FROM calls WHERE session = ? AND id = ? ORDER BY turn DESC, position LIMIT 1"
        async with self._reading() as db:
            row = await one(db, query, (session, call))
        if row is None:
            raise UnknownCall(session, call)
        return rows.call_value(row)

    async def commit_call(self, session: str, call: PendingCall, epoch: int, answer: Remembered | None) -> None:
        """See `Catalog.commit_call`."""
        await unbroken(self._commit_call(session, call, epoch, answer))

    async def _commit_call(self, session: str, call: PendingCall, epoch: int, answer: Remembered | None) -> None:
        async with self._transaction() as db:
            await fence(db, session, epoch)
            await pauses.write_report(db, session, call)
            await self._remember(db, answer)

    async def silent(self, since: float) -> list[str]:
        """See `Catalog.silent`."""
        async with self._reading() as db:
            return await pauses.silent(db, since)

    async def episodes(self, session: str) -> EpisodeSet:
        """See `Catalog.episodes`."""
        async with self._reading() as db:
            await check_session(db, session)
            return await episodes.read_set(db, session)

    async def segments(self, session: str) -> list[SegmentRecord]:
        """See `Catalog.segments`."""
        async with self._reading() as db:
            return await episodes.read_segments(db, session)

    async def built_episode(self, session: str, episode: str) -> bytes:
        """See `Catalog.built_episode`."""
        async with self._reading() as db:
            return await episodes.read_built(db, session, episode)

    async def commit_segments(self, session: str, commit: SegmentsCommit, epoch: int) -> None:
        """See `Catalog.commit_segments`."""
        await unbroken(self._fenced(session, epoch, lambda db: episodes.add_segments(db, session, commit)))

    async def commit_build(self, session: str, commit: BuildCommit, epoch: int) -> None:
        """See `Catalog.commit_build`."""
        await unbroken(self._fenced(session, epoch, lambda db: episodes.replace_episodes(db, session, commit)))

    async def forget_episodes(self, session: str, epoch: int) -> None:
        """See `Catalog.forget_episodes`."""
        await unbroken(self._fenced(session, epoch, lambda db: episodes.forget(db, session)))

    async def _fenced(self, session: str, epoch: int, write: Write) -> None:
        async with self._transaction() as db:
            await fence(db, session, epoch)
            await write(db)

    async def delete(self, session: str, answer: Remembered | None) -> None:
        """See `Catalog.delete`."""
        await unbroken(self._delete(session, answer))

    async def _delete(self, session: str, answer: Remembered | None) -> None:
        async with self._transaction() as db:
            if await one(db, "DELETE FROM sessions WHERE id = ? RETURNING id", (session,)) is None:
                raise UnknownSession(session)
            await self._remember(db, answer)

    async def recall(self, key: IdempotencyKey) -> str | None:
        """See `Catalog.recall`."""
        query = "SELECT fingerprint, answer FROM answers WHERE scope = ? AND key = ?"
        async with self._reading() as db:
            row = await one(db, query, (key.scope, key.key))
        if row is None:
            return None
        if row["fingerprint"] != key.fingerprint:
            raise IdempotencyConflict(key.key)
        return str(row["answer"])

    async def _remember(self, db: aiosqlite.Connection, answer: Remembered | None) -> None:
        if answer is None:
            return
        key = answer.key
        insert = "INSERT INTO answers (scope, key, fingerprint, answer) VALUES (?, ?, ?, ?) RETURNING number"
        row = await one(db, insert, (key.scope, key.key, key.fingerprint, answer.answer))
        assert row is not None, "an INSERT that succeeds returns its row"
        await db.execute("DELETE FROM answers WHERE number <= ?", (row["number"] - self._answers,))

    @asynccontextmanager
    async def _reading(self) -> AsyncIterator[aiosqlite.Connection]:
        async with self._turn:
            try:
                yield self._connection
            except (sqlite3.Error, ValueError) as error:
                raise CatalogError(f"the catalog could not be read: {error}") from error

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[aiosqlite.Connection]:
        async with self._turn:
            try:
                await self._connection.execute("BEGIN IMMEDIATE")
                yield self._connection
                await self._connection.execute("COMMIT")
            except (sqlite3.Error, ValueError) as error:
                raise CatalogError(f"the catalog could not be written: {error}") from error
            finally:
                if self._connection.in_transaction:
                    await self._connection.execute("ROLLBACK")


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
        raise CatalogError(f"{path} is a database of another program; give the catalog a file of its own")
    elif version["user_version"] != SCHEMA_VERSION:
        raise CatalogVersion(
            f"{path} has catalog version {version['user_version']}, this kvrecall reads version {SCHEMA_VERSION}; "
            "run the kvrecall that wrote it, or start with another data directory"
        )


async def _session(db: aiosqlite.Connection, row: sqlite3.Row) -> Session:
    calls = await every(
        db, "SELECT * FROM calls WHERE session = ? AND said IS NULL ORDER BY turn, position", (row["id"],)
    )
    repairs = await pauses.reports_since(db, row["id"], row["turns"])
    return rows.session_value(row, tuple(rows.call_value(call) for call in calls), repairs)


async def _replace_state(db: aiosqlite.Connection, session: str, state: bytes) -> None:
    await db.execute("UPDATE worker_states SET state = ? WHERE session = ?", (state, session))
