"""A Redis catalog whose server has no memory left, or drops keys when it has none."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest

from kvrecall.domain.errors import CatalogError, UnknownSession
from kvrecall.domain.messages import ToolCall
from kvrecall.domain.page_ids import join_ids
from kvrecall.domain.repairs import due_repairs
from kvrecall.domain.sessions.session import Session
from services.catalog.records import (
    ForkCommit,
    IdempotencyKey,
    IdempotencyRecord,
    RepairCommit,
    TurnCommit,
)
from services.catalog.redis.catalog import RedisCatalog
from tests.services.catalog.page_chains import name_chain

MakeSession = Callable[..., Session]
MakeTurn = Callable[..., TurnCommit]
Open = Callable[..., Awaitable[RedisCatalog]]


async def test_a_server_without_memory_is_emptied_by_deleting_sessions(
    open_catalog: Open,
    redis_process: Callable[..., Any],
    make_session: MakeSession,
    make_turn: MakeTurn,
) -> None:
    server = redis_process("maxmemory-policy noeviction")
    catalog = await open_catalog(server.url)
    await catalog.sessions.create(make_session("s"), b"", None)
    chain = name_chain([0, 0, 0])
    await catalog.turns.commit(replace(make_turn("s", 1), page_ids=join_ids(chain)), 1, None)
    child = replace(await catalog.sessions.get("s"), id="child")
    await catalog.sessions.fork(ForkCommit(child, "s", 1, b"", join_ids(chain[:2])), None)
    key = IdempotencyKey("DELETE /sessions/s", "k", "", session="s")
    server.client.config_set("maxmemory", 1)
    with pytest.raises(CatalogError, match="maxmemory"):
        await catalog.turns.commit(make_turn("s", 2), 1, None)
    for id in ("s", "child"):
        assert (await catalog.leases.claim(id, "gateway", 60)).epoch == 1
        assert (await catalog.leases.claim(id, "gateway", 60)).epoch == 1
        assert await catalog.leases.take_over(id, "worker") == 2
    await catalog.sessions.delete("s", IdempotencyRecord(key, "gone"))
    assert await catalog.pages.get_dead(9) == [chain[2]]
    await catalog.sessions.delete("child", None)
    assert await catalog.idempotency.get(key) == "gone"
    assert sorted(await catalog.pages.get_dead(9)) == sorted(chain)
    await catalog.pages.confirm_deleted(chain)
    assert await catalog.pages.get_dead(9) == []
    server.client.config_set("maxmemory", 0)
    assert (await catalog.sessions.get_ids(), (await catalog.sessions.get_use("")).tokens) == (
        [],
        0,
    )


@pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-lfu", "allkeys-random"])
async def test_a_server_that_evicts_sessions_is_refused_with_what_to_do(
    open_catalog: Open, redis_process: Callable[..., Any], policy: str
) -> None:
    server = redis_process(f"maxmemory-policy {policy}")
    with pytest.raises(CatalogError, match=f"{policy}.*set maxmemory-policy to noeviction"):
        await open_catalog(server.url)
    assert server.client.dbsize() == 0
    server.client.config_set("maxmemory-policy", "noeviction")
    await open_catalog(server.url)


@pytest.mark.parametrize("evicted", [[":turns"], [":tokens"], [":turns", ":tokens"]])
async def test_a_session_without_its_turn_log_is_refused_and_never_continued(
    open_catalog: Open,
    redis_server: Any,
    redis_url: str,
    make_session: MakeSession,
    make_turn: MakeTurn,
    calls: tuple[ToolCall, ToolCall],
    evicted: list[str],
) -> None:
    namespace = uuid4().hex
    catalog = await open_catalog(redis_url, namespace)
    await catalog.sessions.create(make_session("s"), b"", None)
    await catalog.turns.commit(make_turn("s", 1), 1, None)
    await catalog.turns.commit(make_turn("s", 2, *calls), 1, None)
    session = await catalog.sessions.get("s")
    redis_server.client.delete(*(f"{namespace}:{{s}}{name}" for name in evicted))
    with pytest.raises(CatalogError, match=r"incomplete.*noeviction"):
        await catalog.turns.commit(make_turn("s", 3), 1, None)
    with pytest.raises(CatalogError, match="incomplete"):
        await catalog.repairs.commit("s", RepairCommit(due_repairs(session)[0], b"new"), 1)
    with pytest.raises(CatalogError, match="incomplete"):
        await catalog.sessions.fork(ForkCommit(replace(session, id="t"), "s", 2, b""), None)
    if ":tokens" in evicted:
        with pytest.raises(CatalogError, match="incomplete"):
            await catalog.turns.get_token_ids("s")
    assert (await catalog.sessions.get("s")) == session
    assert await catalog.sessions.get_worker_state("s") == b"state 2"
    await catalog.sessions.delete("s", None)
    with pytest.raises(UnknownSession):
        await catalog.sessions.get("s")
