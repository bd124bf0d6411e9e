"""What operations of the Redis catalog cost: not more with more sessions, sharers or tenants."""

import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest

from kvrecall.domain.messages import ToolCall
from kvrecall.domain.page_ids import join_ids
from kvrecall.domain.sessions.session import Session
from kvrecall.domain.settings import session as session_settings
from services.catalog.encryption.keyring import Keyring
from services.catalog.records import ForkCommit, IdempotencyKey, IdempotencyRecord, TurnCommit
from services.catalog.redis.catalog import RedisCatalog
from tests.services.catalog.page_chains import name_chain

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


async def test_a_deletion_costs_the_same_for_any_number_of_sessions_with_its_pages(
    open_catalog: Open,
    redis_url: str,
    count_calls: Callable[[Awaitable[Any]], Awaitable[dict[str, int]]],
    make_session: MakeSession,
    make_turn: MakeTurn,
) -> None:
    costs = []
    page_ids = join_ids(name_chain([0] * 100))
    for sharers in (4, 80):
        catalog = await open_catalog(redis_url)
        await catalog.sessions.create(make_session("s"), b"", None)
        await catalog.turns.commit(replace(make_turn("s", 1), page_ids=page_ids), 1, None)
        parent = await catalog.sessions.get("s")
        for number in range(sharers):
            child = replace(parent, id=f"s {number}")
            await catalog.sessions.fork(ForkCommit(child, "s", 1, b"", page_ids), None)
        fork = ForkCommit(replace(parent, id="last"), "s", 1, b"", page_ids)
        forking = await count_calls(catalog.sessions.fork(fork, None))
        costs.append((forking, await count_calls(catalog.sessions.delete("s", None))))
        assert await catalog.pages.count_dead() == 0
    assert costs[0] == costs[1]
    assert costs[0][0]["hexists"] < 10, "pages that are known are found by a few of them"


async def test_a_turn_that_fills_no_page_writes_nothing_to_the_tree(
    open_catalog: Open,
    redis_url: str,
    count_calls: Callable[[Awaitable[Any]], Awaitable[dict[str, int]]],
    make_session: MakeSession,
    make_turn: MakeTurn,
) -> None:
    catalog = await open_catalog(redis_url)
    await catalog.sessions.create(make_session("s"), b"", None)
    turn = replace(make_turn("s", 1), page_ids=join_ids(name_chain([0, 0])))
    first = await count_calls(catalog.turns.commit(turn, 1, None))
    turn = replace(make_turn("s", 2), page_ids=turn.page_ids)
    second = await count_calls(catalog.turns.commit(turn, 1, None))
    assert first["hincrby"] > second["hincrby"]
    assert "hdel" in first
    assert "hexists" in first
    assert "hexists" not in second


async def test_encryption_adds_no_command_to_a_turn_and_its_reads(
    open_catalog: Open,
    redis_url: str,
    keyring: Keyring,
    count_calls: Callable[[Awaitable[Any]], Awaitable[dict[str, int]]],
    make_session: MakeSession,
    make_turn: MakeTurn,
) -> None:
    costs = []
    for keys in (None, keyring):
        catalog = await open_catalog(redis_url, keyring=keys)
        await catalog.sessions.create(make_session("s"), b"", None)
        await catalog.turns.commit(make_turn("s", 1), 1, None)

        async def take_turn(catalog: RedisCatalog = catalog) -> None:
            await catalog.sessions.get("s", "")
            await catalog.sessions.get_worker_state("s")
            key = IdempotencyKey("turn", "k", "f", "s")
            await catalog.turns.commit(make_turn("s", 2), 1, IdempotencyRecord(key, "{}"))
            await catalog.turns.get_after("s", 0, 9)
            await catalog.idempotency.get(key)

        costs.append(await count_calls(take_turn()))
    assert costs[0] == costs[1]


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


async def test_a_history_of_many_turns_is_looked_up_in_one_command(
    open_catalog: Open,
    redis_url: str,
    count_calls: Callable[[Awaitable[Any]], Awaitable[dict[str, int]]],
) -> None:
    """Beside those that read which catalog it is."""
    catalog = await open_catalog(redis_url)
    costs = []
    for digests in (1, 250):
        names = [f"digest {number}" for number in range(digests)]
        costs.append(await count_calls(catalog.histories.find(names)))
    assert costs[0] == costs[1]
    assert costs[0]["mget"] <= 2
