"""A catalog that vanishes or is replaced under a running process: refused until it is back."""

import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from kvrecall.domain.errors import CatalogReplaced
from kvrecall.domain.sessions.session import Session
from services.catalog.base import Catalog
from services.catalog.redis.catalog import RedisCatalog
from services.catalog.responses import StoredConversation
from services.catalog.sqlite.catalog import SqliteCatalog

MakeSession = Callable[..., Session]
Open = Callable[..., Awaitable[RedisCatalog]]
PAGE = bytes(16)


@pytest.fixture
def redis_server(redis_process: Callable[[], Any]) -> Any:
    """A server of the test's own, which it empties."""
    return redis_process()


async def assert_refused(catalog: Catalog, session: Session) -> None:
    """Check that nothing is found, created or written; `session` is one that it does not know."""
    for refused in (
        lambda: catalog.sessions.create(session, b"", None),
        lambda: catalog.sessions.get("kept"),
        lambda: catalog.pages.find_unknown([PAGE]),
        lambda: catalog.pages.get_dead(1),
        lambda: catalog.conversations.create(StoredConversation("conv_1", "", 1), ()),
        lambda: catalog.api_keys.exist(),
        lambda: catalog.sessions.count(""),
    ):
        with pytest.raises(CatalogReplaced, match="this process serves the catalog"):
            await refused()


@pytest.mark.parametrize("kind", ["redis", "cluster"])
async def test_an_emptied_redis_is_refused_and_takes_no_key_until_the_data_are_back(
    kind: str,
    request: pytest.FixtureRequest,
    redis_process: Callable[[], Any],
    open_catalog: Open,
    make_session: MakeSession,
) -> None:
    namespace = uuid4().hex
    if kind == "redis":
        servers = [redis_process()]
        url = servers[0].url
    else:
        servers = request.getfixturevalue("redis_cluster")
        url = request.getfixturevalue("redis_cluster_url")
    catalog = await open_catalog(url, namespace)
    await catalog.sessions.create(make_session("kept"), b"", None)
    saved = take_keys(servers, namespace)
    assert len(saved) > 3
    await assert_refused(catalog, make_session("new"))
    assert not take_keys(servers, namespace), "nothing was written into the empty catalog"
    for server, key, value in saved:
        server.client.restore(key, 0, value)
    await catalog.sessions.create(make_session("new"), b"", None)
    assert await catalog.pages.find_unknown([PAGE]) == [PAGE]


def take_keys(servers: list[Any], namespace: str) -> list[tuple[Any, bytes, bytes]]:
    """Return a namespace's keys with their values, by server, and delete them there."""
    taken = []
    for server in servers:
        if server.client.info("replication")["role"] == "master":
            for key in server.client.keys(f"{namespace}*"):
                taken.append((server, key, server.client.dump(key)))
                server.client.delete(key)
    return taken


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [("id", "another", "holds another catalog, another"), ("version", "99", "has version 99 now")],
)
async def test_another_id_or_version_is_refused_and_named(
    key: str,
    value: str,
    found: str,
    redis_server: Any,
    open_catalog: Open,
    make_session: MakeSession,
) -> None:
    namespace = uuid4().hex
    catalog = await open_catalog(redis_server.url, namespace)
    redis_server.client.set(f"{namespace}:{key}", value)
    with pytest.raises(CatalogReplaced, match=found) as refused:
        await catalog.sessions.create(make_session("new"), b"", None)
    assert catalog.id in refused.value.message
    await assert_refused(catalog, make_session("new"))


@pytest.mark.parametrize("way", ["deleted", "replaced", "folder deleted"])
async def test_a_file_that_is_deleted_or_replaced_is_refused_until_it_is_back(
    way: str, tmp_path: Path, make_session: MakeSession
) -> None:
    folder, aside = tmp_path / "data", tmp_path / "aside"
    path = folder / "catalog.db"
    catalog = await SqliteCatalog.open(path)
    await catalog.sessions.create(make_session("kept"), b"", None)
    if way == "folder deleted":
        folder.rename(aside)
    else:
        aside.mkdir()
        path.rename(aside / path.name)
    if way == "replaced":
        other = await SqliteCatalog.open(tmp_path / "other.db")
        await other.close()
        shutil.copy(tmp_path / "other.db", path)
    await assert_refused(catalog, make_session("new"))
    if way == "folder deleted":
        aside.rename(folder)
    else:
        (aside / path.name).rename(path)
    await catalog.sessions.create(make_session("new"), b"", None)
    assert await catalog.pages.find_unknown([PAGE]) == [PAGE]
    assert sorted(await catalog.sessions.get_ids()) == ["kept", "new"]
    await catalog.close()
