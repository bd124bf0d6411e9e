"""The Redis catalog under failures: nothing acknowledged is lost, no commit applied twice."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest
from redis import ResponseError

from kvrecall.domain.errors import CatalogError, CatalogVersion, UnknownSession
from kvrecall.domain.messages import ToolCall
from kvrecall.domain.repairs import due_repairs
from kvrecall.domain.reports import RepairReport
from kvrecall.domain.sessions.session import Session
from kvrecall_server.app.redis import redis_client
from services.catalog.encryption.keyring import Keyring
from services.catalog.records import (
    EpisodeSet,
    ForkCommit,
    IdempotencyKey,
    IdempotencyRecord,
    RepairCommit,
    SegmentRecord,
    SegmentsCommit,
    TurnCommit,
)
from services.catalog.redis.catalog import RedisCatalog
from services.catalog.redis.connection.client import CatalogRedis
from tests.every_redis import every_redis

MakeSession = Callable[..., Session]
MakeTurn = Callable[..., TurnCommit]
Open = Callable[..., Awaitable[RedisCatalog]]
TalkOn = Callable[[RedisCatalog], Awaitable["Talk"]]


class CuttingProxy:
    """A proxy that can cut a connection instead of passing on the reply to a commit."""

    def __init__(self, target: int) -> None:
        self.to_cut = 0
        self.when_cut: Callable[[], Awaitable[object]] | None = None
        self._target = target

    async def start(self) -> "CuttingProxy":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def stop(self) -> None:
        self._server.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back_reader, back_writer = await asyncio.open_connection("127.0.0.1", self._target)
        asked = bytearray()

        async def there() -> None:
            while data := await reader.read(1 << 16):
                asked.extend(data)
                back_writer.write(data)
            back_writer.close()

        async def back() -> None:
            while data := await back_reader.read(1 << 16):
                if self.to_cut and b"EVAL" in asked and b"find_result" in asked:
                    self.to_cut -= 1
                    if self.when_cut is not None:
                        await self.when_cut()
                    break
                asked.clear()
                writer.write(data)
            writer.transport.abort()
            back_writer.close()

        with suppress(ConnectionError):
            await asyncio.gather(there(), back())


@pytest.fixture
async def proxy(redis_server: Any) -> AsyncIterator[CuttingProxy]:
    proxy = await CuttingProxy(redis_server.port).start()
    yield proxy
    await proxy.stop()


@every_redis
async def test_a_commit_whose_reply_was_lost_is_applied_once_and_acknowledged(
    open_catalog: Open,
    proxy: CuttingProxy,
    make_session: MakeSession,
    make_turn: MakeTurn,
    calls: tuple[ToolCall, ToolCall],
    repair: RepairReport,
) -> None:
    catalog = await open_catalog(proxy.url)
    segments = SegmentsCommit((SegmentRecord(0, 0, 9, b""),), EpisodeSet(segments=1))

    async def cut(commit: Awaitable[Any]) -> Any:
        proxy.to_cut = 1
        result = await commit
        assert proxy.to_cut == 0
        return result

    await cut(catalog.sessions.create(make_session("s"), b"", None))
    key = IdempotencyKey("turns", "k", "", session="s")
    await cut(
        catalog.turns.commit(make_turn("s", 1, *calls), 1, IdempotencyRecord(key, "response"))
    )
    due = due_repairs(await catalog.sessions.get("s"))[0]
    await cut(catalog.repairs.commit("s", RepairCommit(due, b"repaired", repair), 1))
    await cut(catalog.episodes.commit_segments("s", segments, 1))
    assert await cut(catalog.leases.take_over("s", "w")) == 2
    session = await catalog.sessions.get("s")
    await cut(catalog.sessions.fork(ForkCommit(replace(session, id="child"), "s", 1, b""), None))
    assert (session.turns, session.epoch, len(session.repairs)) == (1, 2, 1)
    assert len(await catalog.repairs.get_latest("s", 9)) == 2
    assert await catalog.idempotency.get(key) == "response"
    await cut(catalog.sessions.delete("s", None))
    assert await catalog.sessions.get_ids() == ["child"]


@every_redis
async def test_a_commit_that_is_cut_repeatedly_is_applied_once(
    open_catalog: Open, proxy: CuttingProxy, make_session: MakeSession, make_turn: MakeTurn
) -> None:
    catalog = await open_catalog(proxy.url)
    await catalog.sessions.create(make_session("s"), b"", None)
    proxy.to_cut = 4
    await catalog.turns.commit(make_turn("s", 1), 1, None)
    assert proxy.to_cut == 0
    assert len(await catalog.turns.get_after("s", 0, 9)) == 1


@every_redis
async def test_a_repeated_commit_returns_its_first_result_even_after_a_takeover(
    open_catalog: Open,
    proxy: CuttingProxy,
    redis_url: str,
    make_session: MakeSession,
    make_turn: MakeTurn,
) -> None:
    namespace = uuid4().hex
    catalog = await open_catalog(proxy.url, namespace)
    other = await open_catalog(redis_url, namespace)
    await catalog.sessions.create(make_session("s"), b"", None)
    proxy.to_cut = 1
    proxy.when_cut = lambda: other.leases.take_over("s", "w")
    await catalog.turns.commit(make_turn("s", 1), 1, None)
    assert (await other.sessions.get("s")).epoch == 2
    assert len(await other.turns.get_after("s", 0, 9)) == 1


class Talk:
    """Turns that are committed to several sessions in turn, with counts of the acknowledged."""

    def __init__(self, catalog: RedisCatalog, make_turn: MakeTurn) -> None:
        self.turns = dict.fromkeys(("s0", "s1", "s2"), 0)
        self._catalog = catalog
        self._make_turn = make_turn

    async def grow(self, by: int) -> None:
        """Commit that many more turns to each session."""
        wanted = {id: turns + by for id, turns in self.turns.items()}
        async with asyncio.timeout(60):
            await asyncio.gather(*(self._grow(id, turns) for id, turns in wanted.items()))

    async def _grow(self, id: str, wanted: int) -> None:
        while self.turns[id] < wanted:
            await self._catalog.turns.commit(self._make_turn(id, self.turns[id] + 1), 1, None)
            self.turns[id] += 1

    async def compare(self) -> None:
        """Check that each acknowledged turn is stored once."""
        for id, turns in self.turns.items():
            found = [turn.number for turn in await self._catalog.turns.get_after(id, 0, 100_000)]
            assert found == list(range(1, turns + 1))
            assert await self._catalog.sessions.get_worker_state(id) == b"state %d" % turns


@pytest.fixture
def talk_on(make_session: MakeSession, make_turn: MakeTurn) -> TalkOn:
    """talk_on(catalog): a Talk on new sessions."""

    async def begin(catalog: RedisCatalog) -> Talk:
        talk = Talk(catalog, make_turn)
        for id in talk.turns:
            await catalog.sessions.create(make_session(id), b"", None)
        await talk.grow(5)
        return talk

    return begin


@every_redis
async def test_acknowledged_commits_survive_kill_9_of_the_server(
    open_catalog: Open, redis_process: Callable[..., Any], talk_on: TalkOn
) -> None:
    server = redis_process("appendonly yes", "appendfsync always")
    talk = await talk_on(await open_catalog(server.url))
    for _ in range(3):
        growing = asyncio.create_task(talk.grow(20))
        await asyncio.sleep(0.02)
        server.kill()
        await asyncio.to_thread(server.start)
        await growing
    await talk.compare()


@every_redis
async def test_a_failover_behind_sentinels_loses_nothing_acknowledged(
    open_catalog: Open, redis_behind_sentinels: tuple[Any, Any, str], talk_on: TalkOn
) -> None:
    primary, replica, url = redis_behind_sentinels
    talk = await talk_on(await open_catalog(url))
    growing = asyncio.create_task(talk.grow(20))
    await asyncio.sleep(0.02)
    primary.kill()
    await growing
    assert replica.client.role()[0] == b"master"
    await talk.compare()


async def test_slots_that_change_their_primary_lose_nothing_acknowledged(
    open_catalog: Open, redis_cluster: list[Any], redis_cluster_url: str, talk_on: TalkOn
) -> None:
    talk = await talk_on(await open_catalog(redis_cluster_url))
    for successors in (redis_cluster[3:], redis_cluster[:3]):
        growing = asyncio.create_task(talk.grow(50))
        for node in successors:
            await asyncio.to_thread(promote, node)
        await growing
    await talk.compare()


def promote(node: Any) -> None:
    """Promote a replica of a cluster; its primary becomes its replica."""
    last = time.monotonic() + 30
    with node.client as client:
        while client.role()[0] != b"master" or not client.role()[2]:
            assert time.monotonic() < last, "the replica did not become the primary"
            with suppress(ResponseError):  # it is the primary already, or not in step with it yet
                client.execute_command("CLUSTER FAILOVER")
            time.sleep(0.2)


@every_redis
async def test_a_primary_that_is_demoted_before_a_replica_has_confirmed_is_asked_again(
    redis_process: Callable[..., Any],
) -> None:
    """A server that has become a replica refuses the question for confirmations itself."""
    server = redis_process()
    catalog = CatalogRedis(redis_client(server.url, 5.0), timeout_seconds=1.0, patience_seconds=30)
    server.client.replicaof("127.0.0.1", 1)
    confirming = asyncio.create_task(catalog.write("key", "WAIT", 0, 10))
    await asyncio.sleep(0.2)
    assert not confirming.done()
    server.client.replicaof("NO", "ONE")
    assert await confirming == 0
    await catalog.close()


@every_redis
async def test_two_gateways_see_the_same_catalog(
    open_catalog: Open, redis_url: str, make_session: MakeSession, make_turn: MakeTurn
) -> None:
    namespace = uuid4().hex
    one, other = [await open_catalog(redis_url, namespace) for _ in range(2)]
    await one.sessions.create(make_session("s"), b"", None)
    assert await other.leases.take_over("s", "w") == 2
    commits = [catalog.turns.commit(make_turn("s", 1), 2, None) for catalog in (one, other)]
    outcomes = await asyncio.gather(*commits, return_exceptions=True)
    assert sorted(type(outcome).__name__ for outcome in outcomes) == [
        "ChangedMeanwhile",
        "NoneType",
    ]
    assert len(await one.turns.get_after("s", 0, 9)) == 1


async def test_all_keys_of_a_session_lie_in_one_slot(
    open_catalog: Open,
    redis_server: Any,
    redis_url: str,
    make_session: MakeSession,
    make_turn: MakeTurn,
    calls: tuple[ToolCall, ToolCall],
) -> None:
    namespace = uuid4().hex
    catalog = await open_catalog(redis_url, namespace)
    await catalog.sessions.create(make_session("a {b}:c"), b"", None)
    await catalog.turns.commit(make_turn("a {b}:c", 1, *calls), 1, None)
    await catalog.leases.claim("a {b}:c", "one", 60)
    keys = redis_server.client.keys(f"{namespace}:{{*")
    assert len(keys) > 5
    assert {key.split(b"{")[1].split(b"}")[0] for key in keys} == {b"a%20%7Bb%7D%3Ac"}


async def test_another_version_is_refused_with_what_to_do(
    open_catalog: Open, redis_server: Any, redis_url: str
) -> None:
    redis_server.client.set("old:version", 99)
    with pytest.raises(CatalogVersion, match="version 99"):
        await open_catalog(redis_url, "old")


async def test_namespaces_do_not_see_each_other(
    open_catalog: Open, redis_url: str, make_session: MakeSession
) -> None:
    one, other = [await open_catalog(redis_url) for _ in range(2)]
    await one.sessions.create(make_session("s"), b"", None)
    assert await other.sessions.get_ids() == []
    with pytest.raises(UnknownSession):
        await other.sessions.get("s")


@every_redis
async def test_an_unreachable_or_refusing_server_is_an_error_without_the_password(
    open_catalog: Open, redis_process: Callable[..., Any]
) -> None:
    server = redis_process()
    server.client.config_set("requirepass", "secret")
    with pytest.raises(CatalogError) as caught:
        await open_catalog(f"redis://:wrong-word@127.0.0.1:{server.port}")
    server.kill()
    with pytest.raises(CatalogError) as unreachable:
        await open_catalog(f"redis://:wrong-word@127.0.0.1:{server.port}", patience_seconds=0.1)
    assert "wrong-word" not in str(caught.value) + str(unreachable.value)


@every_redis
async def test_a_server_without_memory_applies_no_part_of_a_commit(
    open_catalog: Open,
    redis_process: Callable[..., Any],
    make_session: MakeSession,
    make_turn: MakeTurn,
) -> None:
    server = redis_process("maxmemory-policy noeviction")
    catalog = await open_catalog(server.url)
    await catalog.sessions.create(make_session("s"), b"", None)
    await catalog.turns.commit(make_turn("s", 1), 1, None)
    server.client.config_set("maxmemory", 1)
    with pytest.raises(CatalogError):
        await catalog.turns.commit(make_turn("s", 2), 1, None)
    server.client.config_set("maxmemory", 0)
    assert (await catalog.sessions.get("s")).turns == 1
    await catalog.turns.commit(make_turn("s", 2), 1, None)


async def test_a_cancelled_read_ends(open_catalog: Open, redis_url: str) -> None:
    catalog = await open_catalog(redis_url)
    for steps in range(12):
        reading = asyncio.create_task(catalog.sessions.get_ids())
        for _ in range(steps):
            await asyncio.sleep(0)
        if reading.cancel():
            await asyncio.wait({reading})
            assert reading.cancelled()


@every_redis
async def test_a_commit_without_a_replica_is_not_acknowledged(
    redis_behind_sentinels: tuple[Any, Any, str],
    open_catalog: Open,
    make_session: MakeSession,
    make_turn: MakeTurn,
) -> None:
    primary, replica, _ = redis_behind_sentinels
    namespace = uuid4().hex
    catalog = await open_catalog(primary.url, namespace, timeout_seconds=0.2, patience_seconds=1.0)
    await catalog.sessions.create(make_session("s"), b"", None)
    replica.signal(signal.SIGSTOP)
    with pytest.raises(CatalogError, match="no replica confirmed"):
        await catalog.turns.commit(make_turn("s", 1), 1, None)
    replica.signal(signal.SIGCONT)
    await catalog.leases.take_over("s", "w")
    assert replica.client.hget(f"{namespace}:{{s}}", "epoch") == b"2"


@every_redis
async def test_a_write_that_changes_nothing_is_confirmed_in_one_more_exchange(
    redis_process: Callable[..., Any],
    open_catalog: Open,
    make_session: MakeSession,
    until: Callable[..., None],
) -> None:
    """Replicas confirm on their own once a second, and a session is listed again once it is created."""
    primary = redis_process("repl-diskless-sync-delay 0")
    replica = redis_process(f"replicaof 127.0.0.1 {primary.port}")
    await asyncio.to_thread(until, lambda: replica.client.role()[3] == b"connected")
    catalog = await open_catalog(primary.url)
    primary.client.config_resetstat()
    for number in range(5):
        await catalog.sessions.create(make_session(f"s{number}"), b"", None)
    waits = primary.client.info("commandstats")["cmdstat_wait"]["calls"]
    assert 5 * 5 <= waits <= 5 * 7, "five writes a creation, and a fence or two"
    assert not primary.client.keys("*fence*")
    assert replica.client.dbsize() == primary.client.dbsize()


async def test_an_encrypted_catalog_on_a_cluster_is_opened_again(
    open_catalog: Open, redis_cluster_url: str, keyring: Keyring, make_session: MakeSession
) -> None:
    namespace = uuid4().hex
    first = await open_catalog(redis_cluster_url, namespace, keyring=keyring)
    await first.sessions.create(make_session("s", tenant="ann"), b"state", None)
    again = await open_catalog(redis_cluster_url, namespace, keyring=keyring)
    assert await again.sessions.get_worker_state("s") == b"state"
