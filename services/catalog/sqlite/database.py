"""The connection to the SQLite catalog's file, and transactions on it."""

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import aiosqlite

from kvrecall.domain.errors import CatalogError
from services.cancellation import run_to_completion
from services.catalog.sqlite.lock import FileLock
from services.catalog.sqlite.migrate import migrate, read_version
from services.catalog.sqlite.queries import fence
from services.catalog.sqlite.schema import PRAGMAS, SCHEMA_VERSION
from services.catalog.sqlite.session_cache import SessionCache
from services.catalog.versions import CatalogUpgrade

T = TypeVar("T")
Query = Callable[[aiosqlite.Connection], Awaitable[T]]

# The longest wait for a program that uses the file without the lock, to make a backup for example.
_WAIT_MILLISECONDS = 5_000


class Database:
    """One connection. Statements of different transactions are never interleaved."""

    def __init__(self, connection: aiosqlite.Connection, file_lock: FileLock | None = None) -> None:
        self._connection = connection
        self._file_lock = file_lock
        self._lock = asyncio.Lock()
        self._started_at = time.time() - time.monotonic()
        self.cache = SessionCache()

    def now(self) -> float:
        """Return the Unix time, as it passed since the file was opened.

        A clock that is set meanwhile makes no event older or newer than it is.
        """
        return self._started_at + time.monotonic()

    async def close(self) -> None:
        """Finish the running transaction and close the file."""
        async with self._lock:
            await self._connection.close()
            if self._file_lock is not None:
                self._file_lock.release()

    async def read(self, query: Query[T]) -> T:
        """Run a query that changes nothing. Raises CatalogError."""
        async with self._lock:
            try:
                return await query(self._connection)
            except (sqlite3.Error, ValueError) as error:
                raise CatalogError(f"the catalog could not be read: {error}") from error

    async def write(self, change: Query[T], session_id: str | None = None) -> T:
        """Run a change as one transaction, which a cancellation does not interrupt.

        `session_id` is the only session that it changes; None: it may change any. Raises
        CatalogError, after which nothing is changed.
        """

        async def run() -> T:
            try:
                async with self._transaction() as connection:
                    return await change(connection)
            finally:
                self.cache.drop(session_id)

        return await run_to_completion(run())

    async def write_fenced(self, session_id: str, epoch: int, change: Query[T]) -> T:
        """Run a change of a session under its epoch. Raises UnknownSession, StaleEpoch."""

        async def run(connection: aiosqlite.Connection) -> T:
            await fence(connection, session_id, epoch)
            return await change(connection)

        return await self.write(run, session_id)

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[aiosqlite.Connection]:
        async with self._lock:
            try:
                await self._connection.execute("BEGIN IMMEDIATE")
                yield self._connection
                await self._connection.execute("COMMIT")
            except (sqlite3.Error, ValueError) as error:
                raise CatalogError(f"the catalog could not be written: {error}") from error
            finally:
                if self._connection.in_transaction:
                    await self._connection.execute("ROLLBACK")


async def open_database(path: Path) -> tuple[Database, CatalogUpgrade]:
    """Open, create or migrate the catalog's file.

    Raises CatalogVersion for a version that cannot be read, CatalogError when another process uses
    the file, or it cannot be opened or is no catalog.
    """
    try:
        file_lock = await asyncio.to_thread(_lock, path)
    except OSError as error:
        raise _build_unopened(path, error) from error
    try:
        connection, upgrade = await _connect(path)
    except BaseException:
        file_lock.release()
        raise
    return Database(connection, file_lock), upgrade


async def _connect(path: Path) -> tuple[aiosqlite.Connection, CatalogUpgrade]:
    try:
        connection = await aiosqlite.connect(path, isolation_level=None)
    except sqlite3.Error as error:
        raise _build_unopened(path, error) from error
    try:
        return connection, await _prepare(connection, path)
    except (OSError, sqlite3.Error, ValueError) as error:
        await connection.close()
        raise _build_unopened(path, error) from error
    except BaseException:
        await connection.close()
        raise


async def open_beside(path: Path) -> Database | None:
    """Open a catalog's file that another process may be using, for the tables that none caches.

    None if there is no file, or one that `open_database` has to create or migrate first. Raises
    CatalogError.
    """
    if not await asyncio.to_thread(path.is_file):
        return None
    try:
        connection = await aiosqlite.connect(path, isolation_level=None)
    except sqlite3.Error as error:
        raise _build_unopened(path, error) from error
    try:
        await _set_up(connection)
        current = await read_version(connection, path) == SCHEMA_VERSION
    except sqlite3.Error as error:
        await connection.close()
        raise _build_unopened(path, error) from error
    except BaseException:
        await connection.close()
        raise
    if current:
        return Database(connection)
    await connection.close()
    return None


def _build_unopened(path: Path, error: Exception) -> CatalogError:
    return CatalogError(f"the catalog {path} cannot be opened: {error}")


def _lock(path: Path) -> FileLock:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory; name a file in it")
    return FileLock(path)


async def _prepare(connection: aiosqlite.Connection, path: Path) -> CatalogUpgrade:
    await _set_up(connection)
    return await migrate(connection, path)


async def _set_up(connection: aiosqlite.Connection) -> None:
    connection.row_factory = sqlite3.Row
    await connection.execute(f"PRAGMA busy_timeout={_WAIT_MILLISECONDS}")
    for pragma in PRAGMAS:
        await connection.execute(pragma)
