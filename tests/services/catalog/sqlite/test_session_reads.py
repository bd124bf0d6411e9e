"""Reads of sessions: the latest commit, whatever is cached, shared or written meanwhile."""

import asyncio
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from kvrecall.domain.errors import CatalogError, UnknownSession
from kvrecall.domain.sessions.session import Session
from services.catalog.base import Catalog
from services.catalog.records import TurnCommit
from services.catalog.sqlite.storage.file import FileIdentity
from services.catalog.sqlite.storage.reader import SnapshotReader
from services.catalog.sqlite.storage.session_cache import SessionCache

MakeSession = Callable[..., Session]
MakeTurn = Callable[..., TurnCommit]


async def test_reads_at_once_each_get_their_session(
    catalog: Catalog, make_session: MakeSession
) -> None:
    names = [f"s{number}" for number in range(8)]
    for name in names:
        await catalog.sessions.create(make_session(name), b"", None)
    reads = [catalog.sessions.get(name) for name in (*names, "none", *names)]
    found = await asyncio.gather(*reads, return_exceptions=True)
    assert isinstance(found.pop(8), UnknownSession)
    assert [each.id for each in found if isinstance(each, Session)] == names * 2


async def test_another_tenants_session_is_unknown_whether_it_was_read_before_or_not(
    catalog: Catalog, make_session: MakeSession, make_turn: MakeTurn, calls: Any
) -> None:
    sessions = catalog.sessions
    await sessions.create(make_session("plain", tenant="ann"), b"", None)
    await sessions.create(make_session("waits", tenant="ann"), b"", None)
    await catalog.turns.commit(make_turn("waits", 1, *calls), 1, None)
    for _ in range(2):
        for name in ("plain", "waits"):
            reads = [sessions.get(name, tenant) for tenant in ("ben", "ann", "", None)]
            found = await asyncio.gather(*reads, return_exceptions=True)
            assert [isinstance(each, UnknownSession) for each in found] == [True, False] * 2, name
            with pytest.raises(UnknownSession):
                await sessions.get(name, "ben")
            assert (await sessions.get(name, "ann")).id == name
            assert (await sessions.get(name)).id == name
    with pytest.raises(UnknownSession):
        await sessions.get("none", "ann")


async def test_a_read_that_is_cancelled_harms_no_other(
    catalog: Catalog, make_session: MakeSession
) -> None:
    await catalog.sessions.create(make_session("s"), b"", None)
    first, second = (asyncio.ensure_future(catalog.sessions.get("s")) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).id == "s"
    assert (await catalog.sessions.get("s")).id == "s"


async def test_every_read_after_a_commit_sees_it(
    catalog: Catalog, make_session: MakeSession, make_turn: MakeTurn
) -> None:
    await catalog.sessions.create(make_session("s"), b"", None)

    async def read_on(until: int) -> None:
        while (await catalog.sessions.get("s")).turns < until:  # noqa: ASYNC110
            await asyncio.sleep(0)

    reading = asyncio.create_task(read_on(9))
    for number in range(1, 10):
        assert (await catalog.sessions.get("s")).turns == number - 1
        await catalog.turns.commit(make_turn("s", number), 1, None)
        assert (await catalog.sessions.get("s")).turns == number
    await reading
    epoch = await catalog.leases.take_over("s", "two")
    assert (await catalog.sessions.get("s")).epoch == epoch
    await catalog.sessions.delete("s", None)
    with pytest.raises(UnknownSession):
        await catalog.sessions.get("s")


async def test_sessions_are_counted_by_tenant(catalog: Catalog, make_session: MakeSession) -> None:
    for name, tenant in (("a", "x"), ("b", "x"), ("c", "")):
        await catalog.sessions.create(make_session(name, tenant=tenant), b"", None)
    assert [await catalog.sessions.count(tenant) for tenant in ("x", "", "y")] == [2, 1, 0]
    await catalog.sessions.delete("a", None)
    assert await catalog.sessions.count("x") == 1


class TestSnapshotReader:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return tmp_path / "file.db"

    @pytest.fixture
    def identity(self, path: Path) -> FileIdentity:
        with sqlite3.connect(path) as db:
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("CREATE TABLE t (x)")
            db.execute("CREATE TABLE catalog_id AS SELECT 'id' AS id, x'00' AS secret")
            return FileIdentity(db, path)

    async def test_a_read_does_not_wait_for_a_running_write(
        self, path: Path, identity: FileIdentity
    ) -> None:
        reader = SnapshotReader(path, identity)
        writer = sqlite3.connect(path, isolation_level=None)
        writer.execute("BEGIN IMMEDIATE")
        writer.execute("INSERT INTO t VALUES (1)")
        assert await reader.read(_count) == 0
        writer.execute("COMMIT")
        assert await reader.read(_count) == 1
        await reader.close()
        writer.close()

    async def test_a_failed_query_fails_alone_and_none_can_write(
        self, path: Path, identity: FileIdentity
    ) -> None:
        reader = SnapshotReader(path, identity)
        write = reader.read(lambda db: db.execute("INSERT INTO t VALUES (1)"))
        counted, failed = await asyncio.gather(reader.read(_count), write, return_exceptions=True)
        assert counted == 0
        assert isinstance(failed, CatalogError)
        await reader.close()
        await reader.close()


def _count(db: sqlite3.Connection) -> int:
    (count,) = db.execute("SELECT count(*) FROM t").fetchone()
    return int(count)


class TestSessionCache:
    async def test_a_read_that_a_write_overtook_is_not_kept(self, make_session: Any) -> None:
        cache = SessionCache()
        old, new = make_session("s"), replace(make_session("s"), turns=1)

        async def read_old() -> Session:
            cache.drop("s")  # the write ends while the read is on its way
            return old

        async def read_new() -> Session:
            return new

        assert await cache.get("s", read_old) is old
        assert await cache.get("s", read_new) is new
        assert await cache.get("s", read_old) is new
        cache.drop(None)
        assert await cache.get("s", read_old) is old

    async def test_it_is_bounded_in_number_and_in_size(self, make_session: Any) -> None:
        cache = SessionCache()
        reads = 0

        def read(session: Session) -> Any:
            async def run() -> Session:
                nonlocal reads
                reads += 1
                return session

            return run

        for number in range(1025):
            await cache.get(f"s{number}", read(make_session(f"s{number}")))
        await cache.get("s1024", read(make_session("s1024")))
        assert reads == 1025
        await cache.get("s0", read(make_session("s0")))
        assert reads == 1026
        large = make_session("large", tools=('{"x": "' + "x" * 10_000 + '"}',))
        for _ in range(2):
            await cache.get("large", read(large))
        assert reads == 1028


async def test_a_session_in_redis_that_has_not_changed_is_decoded_once(
    open_catalog: Callable[..., Any],
    redis_url: str,
    make_session: MakeSession,
    make_turn: MakeTurn,
) -> None:
    catalog = await open_catalog(redis_url, uuid4().hex)
    await catalog.sessions.create(make_session("s"), b"", None)
    first = await catalog.sessions.get("s")
    assert await catalog.sessions.get("s") is first
    await catalog.turns.commit(make_turn("s", 1), 1, None)
    second = await catalog.sessions.get("s")
    assert second.turns == 1
    assert await catalog.sessions.get("s") is second
    large = make_session("large", tools=('{"x": "' + "x" * 10_000 + '"}',))
    await catalog.sessions.create(large, b"", None)
    found = await catalog.sessions.get("large")
    assert await catalog.sessions.get("large") is not found
    assert await catalog.sessions.get("large") == found
