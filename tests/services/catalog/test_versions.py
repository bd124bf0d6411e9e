"""Catalogs of another version: a program refuses them, and leaves them as they are."""

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from kvrecall.domain.errors import CatalogError, CatalogVersion
from kvrecall_server.app import catalog as app_catalog
from kvrecall_server.app.errors import CannotServe
from kvrecall_server.app.redis import redis_client
from kvrecall_server.app.settings import Settings
from services.catalog.redis.catalog import SCHEMA_VERSION as REDIS_VERSION
from services.catalog.redis.catalog import RedisCatalog
from services.catalog.redis.connection.keys import Keys
from services.catalog.sqlite.catalog import SqliteCatalog
from services.catalog.sqlite.storage.database import open_beside
from services.catalog.sqlite.storage.schema import APPLICATION_ID, SCHEMA_VERSION

Open = Callable[..., Awaitable[RedisCatalog]]


def execute(path: Path, statement: str) -> list[Any]:
    with closing(sqlite3.connect(path)) as file:
        return file.execute(statement).fetchall()


def dump(path: Path) -> tuple[list[str], Any]:
    """The content of a catalog file, and its version."""
    with closing(sqlite3.connect(path)) as file:
        return list(file.iterdump()), file.execute("PRAGMA user_version").fetchone()


@pytest.fixture
async def file(tmp_path: Path, make_session: Callable[..., Any]) -> Path:
    """A catalog file with a session."""
    catalog = await SqliteCatalog.open(tmp_path / "catalog.sqlite3")
    await catalog.sessions.create(make_session("s"), b"state", None)
    await catalog.close()
    return tmp_path / "catalog.sqlite3"


async def test_a_file_has_the_version_of_the_program_and_opens_again(file: Path) -> None:
    assert execute(file, "PRAGMA user_version") == [(SCHEMA_VERSION,)]
    assert execute(file, "PRAGMA application_id") == [(APPLICATION_ID,)]
    before = dump(file)
    catalog = await SqliteCatalog.open(file)
    assert await catalog.sessions.get_ids() == ["s"]
    await catalog.close()
    assert dump(file) == before


@pytest.mark.parametrize("version", [SCHEMA_VERSION + 1, SCHEMA_VERSION - 1])
async def test_a_file_of_another_version_is_refused_and_left_alone(
    file: Path, version: int
) -> None:
    execute(file, f"PRAGMA user_version = {version}")
    before = dump(file)
    for opened in (SqliteCatalog.open(file), open_beside(file)):
        with pytest.raises(CatalogVersion) as caught:
            await opened
        message = str(caught.value)
        for part in (str(file), f"version {version};", f"version {SCHEMA_VERSION} ", "Run the"):
            assert part in message
    assert dump(file) == before


async def test_an_older_program_does_not_serve_a_newer_directory(file: Path) -> None:
    execute(file, "PRAGMA user_version = 99")
    settings = Settings(data=file.parent)
    assert app_catalog.get_path(settings) == file
    with pytest.raises(CannotServe, match=r"version 99; .* Run the kvrecall that wrote it"):
        await app_catalog.open_catalog(settings)
    assert execute(file, "PRAGMA user_version") == [(99,)]


async def test_a_database_of_another_program_is_refused_and_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "other.db"
    execute(file, "CREATE TABLE things (name TEXT)")
    before = dump(file)
    with pytest.raises(CatalogError, match="database of another program"):
        await SqliteCatalog.open(file)
    assert dump(file) == before


async def test_a_new_namespace_has_the_version_of_the_program(
    redis_server: Any, redis_url: str, open_catalog: Open
) -> None:
    namespace = uuid4().hex
    catalogs = await asyncio.gather(*(open_catalog(redis_url, namespace) for _ in range(3)))
    assert len({catalog.id for catalog in catalogs}) == 1
    assert redis_server.client.get(f"{namespace}:version") == str(REDIS_VERSION).encode()


@pytest.mark.parametrize("server", ["redis_url", "redis_cluster_url"])
@pytest.mark.parametrize("version", ["9", "7", "8>9", "0", "unknown", "", "\N{SNOWMAN}"])
async def test_a_namespace_of_another_version_is_refused_and_left_alone(
    server: str, version: str, request: pytest.FixtureRequest, open_catalog: Open
) -> None:
    url = request.getfixturevalue(server)
    namespace = uuid4().hex
    await open_catalog(url, namespace)
    keys = Keys(namespace)
    async with redis_client(url) as client:
        await client.set(keys.version, version)
        before = await client.get(keys.id)
        with pytest.raises(CatalogVersion) as caught:
            await open_catalog(url, namespace)
        assert await client.get(keys.version) == version.encode()
        assert await client.get(keys.id) == before
    message = str(caught.value)
    for part in (namespace, f"version {version};", f"version {REDIS_VERSION} ", "Run the"):
        assert part in message
