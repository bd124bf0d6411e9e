"""Indexes, references and tombstones of the Redis catalog, also after interrupted commits."""

import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest

from kvrecall.domain.errors import CatalogError, UnknownSession
from kvrecall.domain.messages import ToolCall
from kvrecall.domain.sessions.session import Session, SharedPages
from services.catalog.records import (
    ForkCommit,
    IdempotencyKey,
    IdempotencyRecord,
    OrphanedPages,
    TurnCommit,
)
from services.catalog.redis.catalog import RedisCatalog

MakeSession = Callable[..., Session]
MakeTurn = Callable[..., TurnCommit]
Open = Callable[..., Awaitable[RedisCatalog]]
HOUR = 3600


async def test_a_deleted_session_leaves_only_keys_that_expire(
    open_catalog: Open,
    redis_server: Any,
    redis_url: str,
    make_session: MakeSession,
    make_turn: MakeTurn,
    calls: tuple[ToolCall, ToolCall],
) -> None:
    namespace = uuid4().hex
    catalog = await open_catalog(redis_url, namespace)
    await catalog.sessions.create(make_session("s"), b"", None)
    turn = replace(make_turn("s", 1, *calls), page_ids=bytes(range(32)), shared=())
    await catalog.turns.commit(turn, 1, None)
    child = replace(await catalog.sessions.get("s"), id="t", shared=(SharedPages("s", 1),))
    await catalog.sessions.fork(ForkCommit(child, "s", 1, b""), None)
    for id in ("s", "t"):
        for orphaned in await catalog.sessions.delete(id, None):
            await catalog.page_refs.confirm_deleted(orphaned)
    assert (
        await catalog.page_refs.get_orphaned(),
        await catalog.tool_calls.get_idle_sessions(time.time()),
    ) == ([], [])
    client = redis_server.client
    left = [key.decode() for key in client.keys(f"{namespace}:*") if client.ttl(key) == -1]
    assert {key.removeprefix(f"{namespace}:") for key in left} <= {
        "version",
        "id",
        "secret",
        "tenants",
        "waiting",
    }


async def test_an_entry_without_a_session_is_skipped_and_removed_once_it_is_old(
    open_catalog: Open,
    redis_server: Any,
    redis_url: str,
    make_session: MakeSession,
    make_turn: MakeTurn,
) -> None:
    namespace = uuid4().hex
    catalog = await open_catalog(redis_url, namespace)
    client = redis_server.client
    await catalog.sessions.create(make_session("s", created=5.0), b"", None)
    now = time.time()
    client.zadd(f"{namespace}:sessions:", {"old": 6.0, "new": now})
    client.zadd(f"{namespace}:waiting", {"1 old": 6.0, "1 new": now})
    client.hset(f"{namespace}:lengths:", mapping={"old": "7@6", "": 7})
    assert [session.id for session in (await catalog.sessions.get_page(5, None)).sessions] == ["s"]
    assert await catalog.sessions.get_ids() == ["s"]
    assert await catalog.tool_calls.get_idle_sessions(now) == []
    assert (await catalog.sessions.get_use("")).tokens == 0
    assert client.zrange(f"{namespace}:sessions:", 0, -1) == [b"s", b"new"]
    assert client.zrange(f"{namespace}:waiting", 0, -1) == [b"1 new"]


async def test_a_reference_of_a_session_that_was_never_created_counts_for_an_hour(
    open_catalog: Open, redis_server: Any, redis_url: str, make_session: MakeSession
) -> None:
    namespace = uuid4().hex
    catalog = await open_catalog(redis_url, namespace)
    client = redis_server.client
    now = client.time()[0]
    for owner, since in (("young", now - HOUR // 2), ("old", now - 2 * HOUR)):
        await catalog.sessions.create(make_session(owner), b"", None)
        client.zadd(f"{namespace}:{{{owner}}}:sharers", {"child": 3})
        client.zadd(f"{namespace}:{{{owner}}}:unverified", {"child": since})
    assert await catalog.sessions.delete("young", None) == [OrphanedPages("young", 3)]
    assert (await catalog.sessions.delete("old", None))[0] == OrphanedPages("old", 0)
    assert await catalog.page_refs.get_retained() == [SharedPages("young", 3)]


@pytest.fixture
async def interrupted(
    open_catalog: Open,
    redis_server: Any,
    redis_url: str,
    make_session: MakeSession,
    make_turn: MakeTurn,
) -> RedisCatalog:
    """A catalog with an interrupted deletion of "s", which references pages of "owner"."""
    namespace = uuid4().hex
    catalog = await open_catalog(redis_url, namespace)
    client = redis_server.client
    for id in ("s", "other", "owner"):
        await catalog.sessions.create(make_session(id), b"", None)
    assert await catalog.page_refs.reserve("s", SharedPages("owner", 4))
    await catalog.turns.commit(
        replace(make_turn("s", 1), shared=(SharedPages("owner", 4),)), 1, None
    )
    assert await catalog.sessions.delete("owner", None) == [OrphanedPages("owner", 4)]
    await catalog.page_refs.confirm_deleted(OrphanedPages("owner", 4))
    # The state after a kill right after the deletion in the session's slot.
    client.sadd(f"{namespace}:deleted", "s")
    client.hset(f"{namespace}:{{s}}:gone", mapping={"tenant": "", "digest": ""})
    client.delete(f"{namespace}:{{s}}")
    with pytest.raises(UnknownSession):
        await catalog.sessions.get("s")
    return catalog


async def test_an_interrupted_deletion_is_finished_by_the_next_deletion(
    interrupted: RedisCatalog, make_session: MakeSession
) -> None:
    orphaned = await interrupted.sessions.delete("other", None)
    assert orphaned[0] == OrphanedPages("other", 0)
    assert set(orphaned[1:]) >= {OrphanedPages("s", 0)}
    await interrupted.sessions.create(make_session("another"), b"", None)
    orphaned += await interrupted.sessions.delete("another", None)
    assert OrphanedPages("owner", 0) in orphaned
    assert (
        await interrupted.page_refs.get_retained(),
        (await interrupted.sessions.get_use("")).tokens,
    ) == ([], 0)


async def test_an_interrupted_deletion_is_finished_by_reading_orphaned_pages(
    interrupted: RedisCatalog,
) -> None:
    orphaned = {
        *await interrupted.page_refs.get_orphaned(),
        *await interrupted.page_refs.get_orphaned(),
    }
    assert orphaned == {OrphanedPages("s", 0), OrphanedPages("owner", 0)}
    for each in orphaned:
        await interrupted.page_refs.confirm_deleted(each)
    assert (
        await interrupted.page_refs.get_orphaned(),
        await interrupted.page_refs.get_retained(),
    ) == ([], [])


async def test_a_response_whose_session_was_never_created_is_not_returned(
    open_catalog: Open, redis_server: Any, redis_url: str, make_session: MakeSession
) -> None:
    namespace = uuid4().hex
    catalog = await open_catalog(redis_url, namespace)
    key = IdempotencyKey("POST /sessions", "k", "body")
    await catalog.sessions.create(make_session("s"), b"", IdempotencyRecord(key, "first"))
    redis_server.client.delete(f"{namespace}:{{s}}")
    assert await catalog.idempotency.get(key) is None
    await catalog.sessions.create(make_session("t"), b"", IdempotencyRecord(key, "second"))
    assert await catalog.idempotency.get(key) == "second"
    with pytest.raises(CatalogError, match="answered"):
        await catalog.sessions.create(make_session("u"), b"", IdempotencyRecord(key, "third"))
    assert await catalog.sessions.get_ids() == ["t"]


async def test_lengths_that_were_not_noted_are_corrected(
    open_catalog: Open,
    redis_server: Any,
    redis_url: str,
    make_session: MakeSession,
    make_turn: MakeTurn,
) -> None:
    namespace = uuid4().hex
    catalog = await open_catalog(redis_url, namespace)
    await catalog.sessions.create(make_session("s"), b"", None)
    await catalog.turns.commit(make_turn("s", 1), 1, None)
    redis_server.client.hset(f"{namespace}:lengths:", mapping={"s": "3@6", "": 3})
    assert (await catalog.sessions.get_use("")).tokens == 7
