"""What operations of the Redis catalog cost: not more with more sessions, sharers or tenants."""

import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest

from kvrecall.domain.messages import ToolCall
from kvrecall.domain.sessions.session import Session, SharedPages
from kvrecall.domain.settings import session as session_settings
from services.catalog.records import ForkCommit, OrphanedPages, TurnCommit
from services.catalog.redis.catalog import RedisCatalog
from services.catalog.redis.connection.client import CatalogRedis

MakeSession = Callable[..., Session]
MakeTurn = Callable[..., TurnCommit]
Open = Callable[..., Awaitable[RedisCatalog]]
HOUR = 3600
DAY = 24 * HOUR


@pytest.fixture
def redis_server(redis_process: Callable[[], Any]) -> Any:
    """A server of the test's own: all commands are counted."""
    return redis_process()


@pytest.fixture
def redis_url(redis_server: Any) -> str:
    url: str = redis_server.url
    return url


@pytest.fixture
def count_calls(redis_server: Any) -> Callable[[Awaitable[Any]], Awaitable[dict[str, int]]]:
    """count_calls(operation): how often it ran each command, within scripts too."""

    async def count(operation: Awaitable[Any]) -> dict[str, int]:
        redis_server.client.config_resetstat()
        await operation
        stats = redis_server.client.info("commandstats")
        ignored = (
            "cmdstat_info",
            "cmdstat_config",
            "cmdstat_ping",
            "cmdstat_client",
            "cmdstat_hello",
        )
        return {
            name.removeprefix("cmdstat_"): each["calls"]
            for name, each in stats.items()
            if not name.startswith(ignored)
        }

    return count


async def add_sharers(
    catalog: RedisCatalog, parent: Session, owner: str, first: int, count: int
) -> None:
    for number in range(first, first + count):
        child = replace(parent, id=f"{owner} {number}", shared=(SharedPages(owner, 3),))
        await catalog.sessions.fork(ForkCommit(child, parent.id, 1, b""), None)


async def test_a_deletion_and_a_sweep_cost_the_same_for_any_number_of_sharers(
    open_catalog: Open,
    redis_url: str,
    count_calls: Callable[[Awaitable[Any]], Awaitable[dict[str, int]]],
    make_session: MakeSession,
    make_turn: MakeTurn,
) -> None:
    costs = []
    for sharers in (4, 80):
        catalog = await open_catalog(redis_url)
        await catalog.sessions.create(make_session("owner"), b"", None)
        await catalog.turns.commit(make_turn("owner", 1), 1, None)
        parent = await catalog.sessions.get("owner")
        await add_sharers(catalog, parent, "owner", 0, sharers)
        assert await catalog.sessions.delete("owner", None) == [OrphanedPages("owner", 3)]
        deletion = await count_calls(catalog.sessions.delete("owner 0", None))
        sweep = await count_calls(catalog.page_refs.get_orphaned())
        retained = await count_calls(catalog.page_refs.get_retained())
        costs.append((deletion, sweep, retained))
        assert await catalog.page_refs.get_retained() == [SharedPages("owner", 3)]
    assert costs[0] == costs[1]
    for cost in costs[0]:
        assert "hgetall" not in cost or cost["hgetall"] == 1  # the tombstone's
        assert "hvals" not in cost


async def test_the_pages_of_all_deleted_sessions_are_listed_in_one_exchange(
    open_catalog: Open,
    redis_url: str,
    make_session: MakeSession,
    make_turn: MakeTurn,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    catalog = await open_catalog(redis_url)
    owners = [f"owner {number}" for number in range(12)]
    for owner in owners:
        await catalog.sessions.create(make_session(owner), b"", None)
        await catalog.turns.commit(make_turn(owner, 1), 1, None)
        await add_sharers(catalog, await catalog.sessions.get(owner), owner, 0, 1)
        await catalog.sessions.delete(owner, None)
    exchanges = []
    original = CatalogRedis._retry

    async def count(self: CatalogRedis, operation: Callable[[], Awaitable[Any]]) -> Any:
        exchanges.append(operation)
        return await original(self, operation)

    monkeypatch.setattr(CatalogRedis, "_retry", count)
    retained = await catalog.page_refs.get_retained()
    assert retained == [SharedPages(owner, 3) for owner in sorted(owners)]
    assert len(exchanges) == 2  # the deleted sessions, then the references to each


async def test_a_quota_is_read_without_reading_the_tenant_s_sessions(
    open_catalog: Open,
    redis_url: str,
    count_calls: Callable[[Awaitable[Any]], Awaitable[dict[str, int]]],
    make_session: MakeSession,
    make_turn: MakeTurn,
) -> None:
    catalog = await open_catalog(redis_url)
    for number in range(12):
        await catalog.sessions.create(make_session(f"s{number}"), b"", None)
        await catalog.turns.commit(make_turn(f"s{number}", 1), 1, None)
    cost = await count_calls(catalog.sessions.get_use(""))
    assert cost["hrandfield"] == 1
    assert cost["hget"] <= 5  # the sum, and a few lengths that are compared with their sessions
    assert not cost.keys() & {"hvals", "hgetall", "eval"}
    assert (await catalog.sessions.get_use("")).tokens == 12 * 7


@pytest.mark.parametrize("due", [0, 2])
async def test_a_sweep_reads_what_has_expired_for_any_number_of_sessions_and_tenants(
    open_catalog: Open,
    redis_url: str,
    count_calls: Callable[[Awaitable[Any]], Awaitable[dict[str, int]]],
    make_session: MakeSession,
    due: int,
) -> None:
    catalog = await open_catalog(redis_url)
    for number in range(due):
        session = make_session(f"due {number}", expires_after_seconds=0.0)
        await catalog.sessions.create(session, b"", None)
    costs = []
    for first, last in ((0, 3), (3, 60)):
        for number in range(first, last):
            tenant = f"t{number // 2}"
            session = make_session(f"s{number}", expires_after_seconds=DAY, tenant=tenant)
            await catalog.sessions.create(session, b"", None)
        costs.append(await count_calls(catalog.expiry.get_expired(9)))
        assert len(await catalog.expiry.get_expired(9)) == due
    assert costs[0] == costs[1]
    reads = {"hmget": due} if due else {}
    exchanges = 3 if due else 2  # each reads the catalog's identity
    assert costs[0] == {"time": 1, "zrangebyscore": 1, "mget": exchanges, **reads}


async def test_a_session_with_turns_is_looked_at_by_sweeps_once_in_a_lifetime(
    open_catalog: Open,
    redis_url: str,
    count_calls: Callable[[Awaitable[Any]], Awaitable[dict[str, int]]],
    make_session: MakeSession,
    make_turn: MakeTurn,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    catalog = await open_catalog(redis_url)
    monkeypatch.setattr(session_settings, "ONE_SHOT_SECONDS", 0.0)
    session = make_session("s", expires_after_seconds=DAY, matched=True)
    await catalog.sessions.create(session, b"", None)
    for number in (1, 2):
        lifetime = session.settings.get_lifetime(number)
        commit = replace(make_turn("s", number), lifetime=lifetime)
        await catalog.turns.commit(commit, 1, None)
    costs = [await count_calls(catalog.expiry.get_expired(9)) for _ in range(2)]
    assert [cost.get("hmget", 0) for cost in costs] == [1, 0]


async def test_a_tenant_without_sessions_is_forgotten_once_it_is_idle(
    open_catalog: Open, redis_server: Any, redis_url: str, make_session: MakeSession
) -> None:
    namespace = uuid4().hex
    catalog = await open_catalog(redis_url, namespace)
    for tenant in ("idle", "new", "busy"):
        await catalog.sessions.create(make_session(f"of {tenant}", tenant=tenant), b"", None)
    for tenant in ("idle", "new"):
        await catalog.sessions.delete(f"of {tenant}", None)
    tenants = f"{namespace}:tenants"
    yesterday = time.time() - DAY
    redis_server.client.zadd(tenants, {"idle": yesterday, "busy": yesterday})
    assert await catalog.sessions.get_ids() == ["of busy"]
    assert set(redis_server.client.zrange(tenants, 0, -1)) == {b"new", b"busy"}


async def test_events_have_the_time_of_the_server_not_of_the_process(
    open_catalog: Open,
    redis_server: Any,
    redis_url: str,
    make_session: MakeSession,
    make_turn: MakeTurn,
    calls: tuple[ToolCall, ToolCall],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    catalog = await open_catalog(redis_url)
    await catalog.sessions.create(make_session("s"), b"", None)
    first, _ = redis_server.client.time()
    true = time.time
    monkeypatch.setattr(time, "time", lambda: true() + DAY)
    await catalog.turns.commit(make_turn("s", 1, *calls), 1, None)
    one, other = (await catalog.sessions.get("s")).calls
    await catalog.tool_calls.commit("s", one, 1, None, (0, "x"))
    child = replace(await catalog.sessions.get("s"), id="child", calls=())
    await catalog.sessions.fork(ForkCommit(child, "s", 1, b""), None)
    stored = [await catalog.tool_calls.get(id, call.id) for id in ("s", "child") for call in calls]
    times = [call.last_event_at for call in stored]
    now = await catalog.tool_calls.get_time()
    assert all(first <= at <= now for at in [other.last_event_at, *times])
    assert now < true() + DAY / 2
    assert await catalog.tool_calls.get_idle_sessions(now - HOUR) == []


async def test_the_last_piece_of_an_output_costs_what_the_first_one_did(
    open_catalog: Open,
    redis_server: Any,
    redis_url: str,
    count_calls: Callable[[Awaitable[Any]], Awaitable[dict[str, int]]],
    make_session: MakeSession,
    make_turn: MakeTurn,
    calls: tuple[ToolCall, ToolCall],
) -> None:
    catalog = await open_catalog(redis_url)
    await catalog.sessions.create(make_session("s"), b"", None)
    await catalog.turns.commit(make_turn("s", 1, *calls), 1, None)
    call, _ = (await catalog.sessions.get("s")).calls
    costs = []
    for index in range(100, 300):
        commands = await count_calls(
            catalog.tool_calls.commit("s", call, 1, None, (index, "x" * 100))
        )
        stats = redis_server.client.info("stats")
        costs.append((commands, stats["total_net_input_bytes"], stats["total_net_output_bytes"]))
    first, last = costs[1], costs[-1]  # the first of all loads the script
    assert last[0] == first[0]
    assert abs(last[1] - first[1]) < 100
    assert abs(last[2] - first[2]) < 1000, "statistics are of other lengths"
