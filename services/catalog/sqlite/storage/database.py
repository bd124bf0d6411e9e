"""The connection to the SQLite catalog's file, and transactions on it."""

import asyncio
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar, TypeVarTuple

from kvrecall.domain.errors import CatalogError
from services.cancellation import run_to_completion
from services.catalog.encryption.keyring import Keyring
from services.catalog.sqlite.storage.disk_reserve import DiskReserve, build_full, is_full
from services.catalog.sqlite.storage.file import FileIdentity, FileLock
from services.catalog.sqlite.storage.queries import fence
from services.catalog.sqlite.storage.schema import PRAGMAS, create_or_check, is_catalog
from services.catalog.sqlite.storage.session_cache import SessionCache

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")
Query = Callable[[sqlite3.Connection], T]

# The longest wait for a program that uses the file without the lock, to make a backup for example.
_WAIT_MILLISECONDS = 5_000


class Database:
    """One connection, on one thread, which runs one query or transaction after another.

    Each is a plain function that runs on that thread as a whole: one hop between threads instead of
    one per statement.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        identity: FileIdentity,
        thread: ThreadPoolExecutor,
        file_lock: FileLock | None = None,
        reserve: DiskReserve | None = None,
    ) -> None:
        self._connection = connection
        self.identity = identity
        self._thread = thread
        self._file_lock = file_lock
        self._reserve = reserve
        self._closed = False
        self._started_at = time.time() - time.monotonic()
        self.cache = SessionCache()

    def now(self) -> float:
        """Return the Unix time, as it passed since the file was opened.

        A clock that is set meanwhile makes no event older or newer than it is.
        """
        return self._started_at + time.monotonic()

    async def close(self) -> None:
        """Finish what was asked for and close the file."""
        if self._closed:
            return
        self._closed = True
        await _run_on(self._thread, self._connection.close)
        self._thread.shutdown()
        if self._file_lock is not None:
            self._file_lock.release()

    async def read(self, query: Query[T]) -> T:
        """Run a query that changes nothing. Raises CatalogError, CatalogReplaced."""
        self._check_open()
        try:
            return await _run_on(self._thread, self._run_query, query)
        except (sqlite3.Error, ValueError) as error:
            raise CatalogError(f"the catalog could not be read: {error}") from error

    async def has_room(self) -> bool:
        """Return whether more may be stored. Raises CatalogError."""
        reserve = self._reserve
        return reserve is None or await self.read(reserve.has_room)

    async def write(
        self, change: Query[T], session_id: str | None = None, *, grows: bool = True
    ) -> T:
        """Run a change as one transaction, which a cancellation does not interrupt.

        `session_id` is the only session that it changes; None: it may change any. One that `grows`
        stores more: it leaves the disk's reserve to the others. Raises CatalogError, StorageFull,
        CatalogReplaced, after which nothing is changed.
        """

        async def run() -> T:
            self._check_open()
            try:
                run_write = self._run_growing if grows else self._run_shrinking
                return await _run_on(self._thread, run_write, change)
            except (sqlite3.Error, ValueError) as error:
                if isinstance(error, sqlite3.Error) and is_full(error):
                    raise build_full(str(error)) from error
                raise CatalogError(f"the catalog could not be written: {error}") from error
            finally:
                self.cache.drop(session_id)

        return await run_to_completion(run())

    async def write_fenced(self, session_id: str, epoch: int, change: Query[T]) -> T:
        """Run a change of a session under its epoch. Raises UnknownSession, StaleEpoch."""

        def run(connection: sqlite3.Connection) -> T:
            fence(connection, session_id, epoch)
            return change(connection)

        return await self.write(run, session_id)

    async def forget_old_pages(self) -> None:
        """Empty the write-ahead log, which has pages as they were. Raises CatalogError."""
        self._check_open()
        try:
            await _run_on(self._thread, self._empty_log)
        except sqlite3.Error as error:
            raise CatalogError(f"the catalog's log could not be emptied: {error}") from error

    def _empty_log(self) -> None:
        self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def _run_query(self, query: Query[T]) -> T:
        self.identity.require()
        return query(self._connection)

    def _run_growing(self, change: Query[T]) -> T:
        if self._reserve is not None:
            self._reserve.require_room(self._connection)
        return self._run_transaction(change)

    def _run_shrinking(self, change: Query[T]) -> T:
        try:
            return self._run_transaction(change)
        except sqlite3.Error as error:
            if self._reserve is None or not is_full(error) or not self._reserve.release():
                raise
        return self._run_transaction(change)

    def _run_transaction(self, change: Query[T]) -> T:
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            self.identity.require()
            result = change(self._connection)
            self._connection.execute("COMMIT")
            return result
        finally:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")

    def _check_open(self) -> None:
        if self._closed:
            raise CatalogError("the catalog is closed")


async def open_database(
    path: Path, reserve_bytes: int = 0, keyring: Keyring | None = None
) -> Database:
    """Open or create the catalog's file, with a reserve of the disk for deletions.

    The secret of a new one is wrapped, if there is a `keyring`.

    Raises CatalogVersion for a version that cannot be read, CatalogError when another process uses
    the file, or it cannot be opened or is no catalog.
    """
    thread = ThreadPoolExecutor(1, thread_name_prefix="catalog")
    file_lock = None
    try:
        file_lock = await _run_on(thread, _lock, path)
        reserve = DiskReserve(path, reserve_bytes)
        connection, identity = await _run_on(thread, _open_with, path, reserve, keyring)
    except BaseException as error:
        thread.shutdown()
        if file_lock is not None:
            file_lock.release()
        if isinstance(error, OSError | sqlite3.Error | ValueError):
            raise _build_unopened(path, error) from error
        raise
    return Database(connection, identity, thread, file_lock, reserve)


async def open_beside(path: Path) -> Database | None:
    """Open a catalog's file that another process may be using, for the tables that none caches.

    None if there is no file, or one in which `open_database` has to create the tables first. Raises
    CatalogVersion, CatalogError.
    """
    thread = ThreadPoolExecutor(1, thread_name_prefix="catalog")
    opened = None
    try:
        opened = await _run_on(thread, _open_current, path)
    except (OSError, sqlite3.Error) as error:
        raise _build_unopened(path, error) from error
    finally:
        if opened is None:
            thread.shutdown()
    return None if opened is None else Database(*opened, thread)


async def _run_on(
    thread: ThreadPoolExecutor, function: Callable[[*Arguments], T], *arguments: *Arguments
) -> T:
    return await asyncio.get_running_loop().run_in_executor(thread, function, *arguments)


def _open_with(
    path: Path, reserve: DiskReserve, keyring: Keyring | None
) -> tuple[sqlite3.Connection, FileIdentity]:
    """Open the file; where the disk has no room for that, give up the reserve first."""
    try:
        opened = _open(path, keyring)
    except sqlite3.Error:  # without room for its index, the log cannot be opened
        if not reserve.release():
            raise
        return _open(path, keyring)
    reserve.fill()
    return opened


def _open(path: Path, keyring: Keyring | None) -> tuple[sqlite3.Connection, FileIdentity]:
    """Open the file; one that is empty is given its tables."""
    connection = _connect(path)
    try:
        create_or_check(connection, path, keyring)
        return connection, FileIdentity(connection, path)
    except BaseException:
        connection.close()
        raise


def _open_current(path: Path) -> tuple[sqlite3.Connection, FileIdentity] | None:
    """Open the file if it is there and has its tables."""
    if not path.is_file():
        return None
    connection = _connect(path)
    try:
        if is_catalog(connection, path):
            return connection, FileIdentity(connection, path)
    except BaseException:
        connection.close()
        raise
    connection.close()
    return None


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        connection.row_factory = sqlite3.Row
        connection.execute(f"PRAGMA busy_timeout={_WAIT_MILLISECONDS}")
        for pragma in PRAGMAS:
            connection.execute(pragma)
    except BaseException:
        connection.close()
        raise
    return connection


def _build_unopened(path: Path, error: Exception) -> CatalogError:
    return CatalogError(f"the catalog {path} cannot be opened: {error}")


def _lock(path: Path) -> FileLock:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory; name a file in it")
    return FileLock(path)
