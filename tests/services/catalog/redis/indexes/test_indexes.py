"""Indexes of the Redis catalog, also after interrupted commits."""

import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest

from kvrecall.domain.errors import CatalogError
from kvrecall.domain.messages import ToolCall
from kvrecall.domain.sessions.session import Session
from services.catalog.records import (
    ForkCommit,
    IdempotencyKey,
    IdempotencyRecord,
    TurnCommit,
)
from services.catalog.redis.catalog import RedisCatalog

MakeSession = Callable[..., Session]
MakeTurn = Callable[..., TurnCommit]
Open = Callable[..., Awaitable[RedisCatalog]]


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
    turn = replace(make_turn("s", 1, *calls), page_ids=bytes(range(32)))
    await catalog.turns.commit(turn, 1, None)
    child = replace(await catalog.sessions.get("s"), id="t")
    await catalog.sessions.fork(ForkCommit(child, "s", 1, b"", bytes(range(16))), None)
    for id in ("s", "t"):
        await catalog.sessions.delete(id, None)
    await catalog.pages.confirm_deleted(await catalog.pages.get_dead(9))
    assert await catalog.tool_calls.get_idle_sessions(time.time()) == []
    client = redis_server.client
    left = [key.decode() for key in client.keys(f"{namespace}:*") if client.ttl(key) == -1]
    assert {key.removeprefix(f"{namespace}:") for key in left} <= {
        "version",
        "id",
        "secret",
        "tenants",
        "waiting",
        "{pages}:ends",  # the number of the last proposal
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
