"""The thread of the SQLite catalog: whole transactions, one after the other, until it is closed."""

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from kvrecall.domain.errors import CatalogError
from services.catalog.sqlite.storage.database import Database, open_database
from services.catalog.sqlite.storage.queries import fetch_value


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    database = await open_database(tmp_path / "catalog.db")
    await database.write(lambda db: _run(db, "CREATE TABLE numbers (number)"))
    yield database
    await database.close()


def _run(db: sqlite3.Connection, statement: str) -> None:
    db.execute(statement)


def _count(db: sqlite3.Connection) -> int:
    return fetch_value(db, "SELECT count(*) FROM numbers")


async def test_transactions_run_whole_on_one_thread_that_is_not_the_event_loops(
    database: Database,
) -> None:
    seen: list[tuple[str, int]] = []

    def insert(name: str) -> Callable[[sqlite3.Connection], None]:
        def run(db: sqlite3.Connection) -> None:
            for _ in range(5):
                db.execute("INSERT INTO numbers VALUES (1)")
                seen.append((name, threading.get_ident()))

        return run

    await asyncio.gather(*(database.write(insert(name)) for name in "ab"))
    assert [name for name, _ in seen] == [*"aaaaabbbbb"]
    assert len({thread for _, thread in seen}) == 1
    assert seen[0][1] != threading.get_ident()


async def test_a_change_that_fails_leaves_nothing_behind(database: Database) -> None:
    def insert_and_fail(db: sqlite3.Connection) -> None:
        db.execute("INSERT INTO numbers VALUES (1)")
        db.execute("INSERT INTO nowhere VALUES (1)")

    with pytest.raises(CatalogError, match="nowhere"):
        await database.write(insert_and_fail)
    assert await database.read(_count) == 0


async def test_a_write_that_is_cancelled_is_committed(database: Database) -> None:
    writing = asyncio.create_task(
        database.write(lambda db: _run(db, "INSERT INTO numbers VALUES (1)"))
    )
    await asyncio.sleep(0)
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert await database.read(_count) == 1


async def test_a_closed_database_is_neither_read_nor_written(database: Database) -> None:
    await database.close()
    with pytest.raises(CatalogError, match="closed"):
        await database.read(_count)
    with pytest.raises(CatalogError, match="closed"):
        await database.write(_count)
