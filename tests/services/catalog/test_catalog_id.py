"""A catalog has an id and a secret of its own, and says which sessions it does not know."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

from kvrecall.domain.page_ids import KEY_BYTES
from kvrecall.domain.sessions.session import Session, SharedPages
from services.catalog.base import Catalog
from services.catalog.records import ForkCommit, OrphanedPages, TurnCommit
from services.catalog.redis.catalog import RedisCatalog
from services.catalog.sqlite.catalog import SqliteCatalog


async def test_a_file_keeps_its_id_and_its_secret_and_another_has_others(tmp_path: Path) -> None:
    ids, secrets = [], []
    for name in ("one.db", "one.db", "other.db"):
        catalog = await SqliteCatalog.open(tmp_path / name)
        ids.append(catalog.id)
        secrets.append(catalog.secret)
        await catalog.close()
    assert ids[0] == ids[1] != ids[2]
    assert secrets[0] == secrets[1] != secrets[2]
    assert all(len(id) == 32 for id in ids)
    assert all(len(secret) == KEY_BYTES for secret in secrets)


async def test_gateways_of_one_namespace_share_its_id_and_its_secret(
    open_catalog: Callable[..., Awaitable[RedisCatalog]], redis_url: str
) -> None:
    namespaces = uuid4().hex, uuid4().hex
    one = await open_catalog(redis_url, namespaces[0])
    same = await open_catalog(redis_url, namespaces[0])
    other = await open_catalog(redis_url, namespaces[1])
    assert one.id == same.id != other.id
    assert one.secret == same.secret != other.secret
    assert len(one.secret) == KEY_BYTES


async def test_sessions_that_do_not_exist_are_found_with_their_shared_pages(
    catalog: Catalog,
    make_session: Callable[..., Session],
    make_turn: Callable[..., TurnCommit],
) -> None:
    for session in ("kept", "parent", "gone"):
        await catalog.sessions.create(make_session(session), b"", None)
    await catalog.turns.commit(make_turn("parent", 1), 1, None)
    shared = (SharedPages("parent", 3),)
    child = replace(await catalog.sessions.get("parent"), id="child", shared=shared)
    await catalog.sessions.fork(ForkCommit(child, "parent", 1, b"child"), None)
    for session in ("parent", "gone"):
        await catalog.sessions.delete(session, None)
    found = await catalog.page_refs.find_unknown(["kept", "parent", "gone", "never", "child"])
    assert sorted(found, key=lambda each: each.session) == [
        OrphanedPages("gone", 0),
        OrphanedPages("never", 0),
        OrphanedPages("parent", 3),
    ]
    assert await catalog.page_refs.find_unknown([]) == []
