"""Redis namespaces of older versions: migrated by one process at a time, whatever interrupts it."""

import asyncio
import json
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import uuid4

import pytest
from redis import Redis, RedisCluster

from kvrecall.app.redis import redis_client
from kvrecall.domain.commit_points import CommitPoint
from kvrecall.domain.errors import CatalogError, CatalogVersion
from kvrecall.domain.tool_calls import CallStatus
from services.catalog.records import OrphanedPages
from services.catalog.redis.catalog import RedisCatalog
from services.catalog.redis.client import CatalogRedis
from services.catalog.redis.keys import Keys
from services.catalog.redis.migrations import global_expiry, standard_terms
from services.catalog.redis.migrations import runner as migrate
from services.catalog.redis.migrations.passes import Steps, run_passes
from services.catalog.redis.migrations.versions import MIGRATIONS, SCHEMA_VERSION

Open = Callable[..., Awaitable[RedisCatalog]]

OLD_NAMES = (b'"heard_at"', b'"said"', b'"cut"', b'"repairs_left_out"', b'"remembered"')


class OldNamespace:
    """A namespace of kvrecall 0.1.0, with some of each thing whose name has changed."""

    def __init__(self, client: Any, url: str, old_release: Any) -> None:
        self.client = client
        self.url = url
        self.name = f"{uuid4().hex}:catalog"
        old_release.load_redis(client, self.name.removesuffix(":catalog"))
        self.expected = old_release.expected["redis"]["sessions"]
        self.paused = self.expected["paused"]["id"]
        client.hset(f"{self.name}:{{{self.paused}}}:calls", "1:said:x:y", "inline")
        client.sadd(f"{self.name}:leftovers", "gone")
        client.sadd(f"{self.name}:deleted", "gone")
        client.hset(f"{self.name}:{{gone}}:gone", mapping={"tenant": "", "kept": 2, "due": 1})
        client.hset(f"{self.name}:{{gone}}:sharers", self.paused, f"2 {int(time.time())}")
        client.set(f"{self.name}:of another:{{x}}:turns", "not a catalog's")

    def dump(self) -> dict[bytes, Any]:
        """All keys of the namespace with their values."""
        names = self.client.scan_iter(f"{self.name}:*", count=1000)
        return {name: self._read(name) for name in names}

    def _read(self, name: bytes) -> Any:
        match self.client.type(name):
            case b"string":
                return self.client.get(name)
            case b"hash":
                return self.client.hgetall(name)
            case b"list":
                return self.client.lrange(name, 0, -1)
            case b"set":
                return self.client.smembers(name)
            case _:
                return self.client.zrange(name, 0, -1, withscores=True)

    def get_version(self) -> bytes:
        version: bytes = self.client.get(f"{self.name}:version")
        return version

    def read_values(self) -> bytes:
        """All values but those of key names and users' fields, as one text."""
        return repr(sorted(map(repr, self.dump().values()))).encode()


@pytest.fixture(params=["server", "cluster"])
def old_namespace(request: pytest.FixtureRequest, old_release: Any) -> OldNamespace:
    """A namespace of kvrecall 0.1.0 on one server, and on a cluster."""
    if request.param == "server":
        url = request.getfixturevalue("redis_url")
        return OldNamespace(Redis.from_url(url), url, old_release)
    nodes = request.getfixturevalue("redis_cluster")
    client = RedisCluster(host="127.0.0.1", port=nodes[0].port)
    return OldNamespace(client, request.getfixturevalue("redis_cluster_url"), old_release)


@pytest.fixture
def one_server(redis_url: str, old_release: Any) -> OldNamespace:
    """A namespace of kvrecall 0.1.0 on one server."""
    return OldNamespace(Redis.from_url(redis_url), redis_url, old_release)


async def test_the_sessions_of_an_older_namespace_are_all_there(
    old_namespace: OldNamespace, open_catalog: Open
) -> None:
    before = old_namespace.dump()
    catalog = await open_catalog(old_namespace.url, old_namespace.name)
    assert (catalog.upgrade.found, catalog.upgrade.version) == (1, SCHEMA_VERSION)
    assert old_namespace.get_version() == str(SCHEMA_VERSION).encode()
    ids = {session["id"] for session in old_namespace.expected.values()}
    assert set(await catalog.sessions.get_ids()) == ids
    for id in ids:
        session = await catalog.sessions.get(id)
        log = before.get(f"{old_namespace.name}:{{{id}}}:turns".encode(), [])
        turns = await catalog.turns.get_after(id, 0, 99)
        assert session.turns == len(turns) == len(log)
        for turn, text in zip(turns, log, strict=True):
            old = json.loads(text)["outcome"]
            reason = old["finish_reason"].replace("remembered", "appended")
            assert (turn.outcome.finish_reason, turn.number) == (reason, old["turn"])
        length = session.memory.length
        expected = (CommitPoint(0, length),) if length else ()
        assert await catalog.sessions.get_history(id) == expected
        repairs = before.get(f"{old_namespace.name}:{{{id}}}:repairs".encode(), [])
        assert len(await catalog.repairs.get_latest(id, 99)) == len(repairs)


async def test_calls_keep_what_was_stored_of_them(
    old_namespace: OldNamespace, open_catalog: Open
) -> None:
    key = f"{old_namespace.name}:{{{old_namespace.paused}}}:calls".encode()
    fields = old_namespace.dump()[key]
    ((name, old),) = [
        (name.decode(), json.loads(value))
        for name, value in fields.items()
        if value.startswith(b'{"turn"')
    ]
    catalog = await open_catalog(old_namespace.url, old_namespace.name)
    call = await catalog.tool_calls.get(old_namespace.paused, "c1")
    assert (call.status, call.last_event_at) == (CallStatus.PENDING, old["heard_at"])
    assert (call.output.joined, call.consumed_in_turn) == (1, None)
    assert await catalog.tool_calls.get_pieces(old_namespace.paused, call, 0, 9) == ("person: ",)
    after = old_namespace.dump()[key]
    assert after[b"1:inline:x:y"] == b"inline"
    changed = {name.encode(), b"1:said:x:y", b"1:inline:x:y", f"{name}:piece:0".encode()}
    for field in (fields.keys() | after.keys()) - changed:
        assert after[field] == fields[field]
    idle = await catalog.tool_calls.get_idle_sessions(old["heard_at"])
    assert old_namespace.paused in idle


async def test_no_old_name_is_left_and_expiry_and_other_keys_stay(
    old_namespace: OldNamespace, open_catalog: Open
) -> None:
    before = old_namespace.dump()
    ttls = {name: old_namespace.client.pttl(name) for name in before}
    assert all(name in old_namespace.read_values() for name in OLD_NAMES[:3])
    catalog = await open_catalog(old_namespace.url, old_namespace.name)
    values = old_namespace.read_values()
    assert [name for name in OLD_NAMES if name in values] == []
    after = old_namespace.dump()
    leftovers = f"{old_namespace.name}:leftovers".encode()
    orphaned = f"{old_namespace.name}:orphaned".encode()
    assert before.keys() - after.keys() == {leftovers}
    own = (b":unverified", b":history", b":id")
    added = {name for name in after.keys() - before.keys() if not name.endswith(own)}
    assert added == {orphaned}
    for name, ttl in ttls.items():
        if name != leftovers:
            assert (old_namespace.client.pttl(name) == -1) == (ttl == -1)
    other = f"{old_namespace.name}:of another:{{x}}:turns".encode()
    assert after[other] == before[other]
    assert await catalog.page_refs.get_orphaned() == [OrphanedPages("gone", 2)]


async def test_a_migrated_namespace_takes_further_commits(
    one_server: OldNamespace, open_catalog: Open, make_turn: Callable[..., Any]
) -> None:
    catalog = await open_catalog(one_server.url, one_server.name)
    session = await catalog.sessions.get(one_server.paused)
    commit = make_turn(session.id, session.turns + 1)
    await catalog.turns.commit(commit, session.epoch, None)
    assert (await catalog.sessions.get(session.id)).calls == ()
    call = await catalog.tool_calls.get(session.id, "c1")
    assert call.consumed_in_turn == session.turns + 1


async def test_a_migration_that_is_run_again_changes_nothing(
    one_server: OldNamespace, open_catalog: Open
) -> None:
    await open_catalog(one_server.url, one_server.name)
    after = one_server.dump()
    redis = CatalogRedis(redis_client(one_server.url), 1.0, 5.0)

    async def keep_lock() -> None:
        pass

    for steps in MIGRATIONS.values():
        await run_passes(redis, Keys(one_server.name), steps, keep_lock)
    await redis.close()
    assert one_server.dump() == after
    assert not (await open_catalog(one_server.url, one_server.name)).upgrade.upgraded


KILLED = """
import asyncio, os, signal, sys
from kvrecall.app.redis import redis_client
from services.catalog.redis.catalog import RedisCatalog
from services.catalog.redis.client import CatalogRedis

left = int(sys.argv[3])
write = CatalogRedis.write

async def write_and_die(self, key, *command):
    global left
    reply = await write(self, key, *command)
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return reply

CatalogRedis.write = write_and_die
asyncio.run(RedisCatalog.open(redis_client(sys.argv[1]), sys.argv[2]))
"""


@pytest.mark.parametrize(
    ("writes", "step"),
    [(2, b"1>2"), (4, b"1>2"), (6, b"1>2"), (9, b"1>2"), (22, b"2>3"), (25, b"2>3")],
)
async def test_after_a_kill_in_the_middle_the_migration_is_finished_by_the_next(
    one_server: OldNamespace,
    open_catalog: Open,
    monkeypatch: pytest.MonkeyPatch,
    old_release: Any,
    writes: int,
    step: bytes,
) -> None:
    arguments = (KILLED, one_server.url, one_server.name, str(writes))
    killed = await asyncio.create_subprocess_exec(sys.executable, "-c", *arguments)
    assert await killed.wait() == -signal.SIGKILL
    assert one_server.get_version() == step  # no program takes it for whole
    lock = f"{one_server.name}:migration-lock"
    assert 0 < one_server.client.pttl(lock) <= 1000 * migrate._LOCK_SECONDS
    one_server.client.pexpire(lock, 300)
    catalog = await open_catalog(one_server.url, one_server.name)
    assert (catalog.upgrade.found, catalog.upgrade.version) == (int(step[:1]), SCHEMA_VERSION)
    assert one_server.client.exists(lock) == 0
    twin = OldNamespace(one_server.client, one_server.url, old_release)
    await open_catalog(twin.url, twin.name)
    assert drop_namespace(one_server) == drop_namespace(twin)


def drop_namespace(namespace: OldNamespace) -> dict[bytes, Any]:
    """The keys of a namespace without its name and id, and without what differs by time."""
    prefix = f"{namespace.name}:".encode()
    dump = {name.removeprefix(prefix): value for name, value in namespace.dump().items()}
    own = (b":unverified", b"tenants")
    return {name: value for name, value in dump.items() if not name.endswith(own) and name != b"id"}


async def test_of_two_gateways_that_start_at_once_one_migrates(
    one_server: OldNamespace, open_catalog: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    migrations = []

    async def count(redis: CatalogRedis, keys: Keys, steps: Steps, keep_lock: Any) -> None:
        if steps is standard_terms.STEPS:
            migrations.append(steps)
            await asyncio.sleep(0.3)
        await run_passes(redis, keys, steps, keep_lock)

    monkeypatch.setattr(migrate, "run_passes", count)
    opened = [open_catalog(one_server.url, one_server.name) for _ in range(3)]
    catalogs = await asyncio.gather(*opened)
    assert len(migrations) == 1
    assert [catalog.upgrade.found for catalog in catalogs] == [1, 1, 1]
    for catalog in catalogs:
        assert (await catalog.sessions.get(one_server.paused)).outstanding


async def test_a_process_that_lost_the_lock_stops_and_harms_nothing(
    one_server: OldNamespace, open_catalog: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrate, "_LOCK_SECONDS", 0.0301)

    async def stand_still(redis: CatalogRedis, keys: Keys, steps: Steps, keep_lock: Any) -> None:
        await asyncio.sleep(0.1)
        one_server.client.set(f"{one_server.name}:migration-lock", "another")
        await run_passes(redis, keys, steps, keep_lock)

    monkeypatch.setattr(migrate, "run_passes", stand_still)
    with pytest.raises(CatalogError, match="taken the migration over"):
        await open_catalog(one_server.url, one_server.name)
    assert one_server.client.getdel(f"{one_server.name}:migration-lock") == b"another"
    monkeypatch.undo()
    catalog = await open_catalog(one_server.url, one_server.name)
    assert (await catalog.sessions.get(one_server.paused)).outstanding


async def test_a_migration_that_never_ends_is_not_waited_for_without_end(
    one_server: OldNamespace, open_catalog: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrate, "_WAIT_SECONDS", 0.2)
    one_server.client.set(f"{one_server.name}:migration-lock", "another")
    with pytest.raises(CatalogError, match="being migrated by another process"):
        await open_catalog(one_server.url, one_server.name)
    assert one_server.get_version() == b"1"


@pytest.mark.parametrize("version", ["6", "5>6", "0", "2>6", "unknown"])
async def test_a_version_that_cannot_be_read_is_refused_and_left_alone(
    one_server: OldNamespace, open_catalog: Open, version: str
) -> None:
    one_server.client.set(f"{one_server.name}:version", version)
    before = one_server.dump()
    with pytest.raises(CatalogVersion) as caught:
        await open_catalog(one_server.url, one_server.name)
    message = str(caught.value)
    for part in (one_server.name, f"version {version};", f"version {SCHEMA_VERSION} ", "Run the"):
        assert part in message
    assert one_server.dump() == before


@pytest.mark.parametrize("url", ["redis_url", "redis_cluster_url"])
async def test_sessions_of_version_4_expire(
    url: str,
    request: pytest.FixtureRequest,
    open_catalog: Open,
    make_session: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    location = request.getfixturevalue(url)
    namespace = uuid4().hex
    catalog = await open_catalog(location, namespace)
    for number, tenant in enumerate(("", "ann", "b:e n", "b:e n", "b:e n")):
        session = make_session(f"s {number}", tenant=tenant, expires_after_seconds=0.0)
        await catalog.sessions.create(session, b"", None)
    keys = Keys(namespace)
    client = redis_client(location)
    await client.delete(keys.expiring)  # version 4 had the tenants' sets alone
    await client.set(keys.version, "4")
    await client.aclose()
    monkeypatch.setattr(global_expiry, "_ENTRIES_AT_ONCE", 2)
    catalog = await open_catalog(location, namespace)
    assert (catalog.upgrade.found, catalog.upgrade.version) == (4, SCHEMA_VERSION)
    expired = await catalog.expiry.get_expired(9)
    assert sorted(session.id for session in expired) == [f"s {number}" for number in range(5)]
    for session in expired:
        await catalog.sessions.delete(session.id, None)
    assert await catalog.expiry.get_expired(9) == []


async def test_a_new_namespace_has_the_current_version(
    redis_server: Any, redis_url: str, open_catalog: Open
) -> None:
    namespace = uuid4().hex
    catalogs = await asyncio.gather(*(open_catalog(redis_url, namespace) for _ in range(3)))
    assert not any(catalog.upgrade.upgraded for catalog in catalogs)
    assert redis_server.client.get(f"{namespace}:version") == str(SCHEMA_VERSION).encode()


def test_each_version_since_the_oldest_has_a_migration() -> None:
    assert sorted(MIGRATIONS) == list(range(min(MIGRATIONS), SCHEMA_VERSION))
