"""Several workers behind one protocol: real servers in this process, and a registry of them."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any

import grpc
import pytest
from google.protobuf.empty_pb2 import Empty
from grpc_health.v1 import health, health_pb2_grpc
from structlog.testing import capture_logs

from kvrecall.domain.errors import RegistryError, WorkerLost, WorkerRefused
from kvrecall.protocol import PROTOCOL_VERSION
from kvrecall.protocol.v1 import REFUSAL_CODE, worker_pb2_grpc
from kvrecall.protocol.v1 import worker_pb2 as pb
from services.cluster.pool import WorkerPool
from services.cluster.registry import StaticRegistry
from services.cluster.settings import WireSettings
from tests.conftest import free_port

WAY = WireSettings(watch_seconds=0.05, look_seconds=1, quick_seconds=2)


class Scripted(worker_pb2_grpc.WorkerServicer):
    """Records its calls; its turns stream one token and never end."""

    def __init__(self, model: str = "one", protocol_version: int = PROTOCOL_VERSION) -> None:
        self.model = model
        self.protocol_version = protocol_version
        self.calls: list[str] = []
        self.refuses = ""
        self.answers = asyncio.Event()
        self.answers.set()
        self.health = health.aio.HealthServicer()

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.WorkerInfo:
        return pb.WorkerInfo(
            model=self.model,
            fingerprint=self.model,
            slots=4,
            max_budget=256,
            protocol_version=self.protocol_version,
        )

    async def Stats(self, request: Empty, context: Any) -> pb.WorkerStats:
        await self.answers.wait()
        return pb.WorkerStats(slots_in_use=1, sessions=3)

    async def Open(self, request: pb.OpenRequest, context: Any) -> pb.MemoryReport:
        self.calls.append(f"open {request.spec.session}")
        return pb.MemoryReport()

    async def Turn(self, request: pb.TurnRequest, context: Any) -> None:
        self.calls.append(f"turn {request.session}")
        await context.write(pb.TurnEvent(token=pb.TokenChunk(text="one")))
        await asyncio.Event().wait()

    async def Memory(self, request: pb.MemoryRequest, context: Any) -> pb.MemoryReport:
        self.calls.append(f"memory {request.session}")
        return pb.MemoryReport(length=7)

    async def Release(self, request: pb.ReleaseRequest, context: Any) -> Empty:
        self.calls.append(f"release {request.session}")
        return Empty()

    async def Delete(self, request: pb.DeleteRequest, context: Any) -> Empty:
        if self.refuses:
            await context.abort(
                grpc.StatusCode.ABORTED, "no", trailing_metadata=((REFUSAL_CODE, self.refuses),)
            )
        self.calls.append(f"delete {request.session}")
        return Empty()

    async def Fork(self, request: pb.ForkRequest, context: Any) -> pb.ForkResult:
        self.calls.append(f"fork {request.parent}")
        return pb.ForkResult()

    async def Embed(self, request: pb.EmbedRequest, context: Any) -> pb.EmbedResult:
        self.calls.append("embed")
        return pb.EmbedResult(dimensions=3)


class Known:
    """A registry that a test writes itself."""

    loads = True

    def __init__(self) -> None:
        self.found: dict[str, pb.WorkerRecord] = {}
        self.fails = False
        self.read = asyncio.Event()

    async def records(self) -> list[pb.WorkerRecord]:
        self.read.set()
        if self.fails:
            raise RegistryError("the registry is down")
        return list(self.found.values())

    async def close(self) -> None:
        pass

    def add(self, name: str, address: str, **fields: Any) -> None:
        record = pb.WorkerRecord(
            name=name,
            address=address,
            fingerprint="one",
            slots=4,
            free_slots=4,
            protocol_version=PROTOCOL_VERSION,
        )
        record.MergeFrom(pb.WorkerRecord(**fields))
        self.found[name] = record


@asynccontextmanager
async def serving(servicer: Scripted, port: int = 0) -> AsyncIterator[str]:
    """The servicer at an address of this machine."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    worker_pb2_grpc.add_WorkerServicer_to_server(servicer, server)
    health_pb2_grpc.add_HealthServicer_to_server(servicer.health, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


class Cluster:
    """Workers a and b, a registry that knows them, and the pool."""

    def __init__(self) -> None:
        self.servicers = {"a": Scripted(), "b": Scripted()}
        self.known = Known()
        self.servers = {name: AsyncExitStack() for name in self.servicers}
        self.pool: WorkerPool

    async def open(self, session: str, worker: str, avoid: Sequence[str] = ()) -> str:
        """Choose a worker for a session and open it there; returns its name."""
        placed = self.pool.choose_worker(session, worker, avoid)
        await self.pool.open(pb.OpenRequest(spec=pb.SessionSpec(session=session)))
        return placed

    async def refreshed(self) -> None:
        """Return when the pool has refreshed with the registry as it is now."""
        for _ in range(2):
            self.known.read.clear()
            await self.known.read.wait()
        await asyncio.sleep(0.05)

    async def names(self) -> list[str]:
        return [each.name for each in await self.pool.workers()]


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    made = Cluster()
    for name, servicer in made.servicers.items():
        made.known.add(name, await made.servers[name].enter_async_context(serving(servicer)))
    made.pool = await WorkerPool.start(made.known, WAY)
    try:
        yield made
    finally:
        await made.pool.close()
        for server in made.servers.values():
            await server.aclose()


async def test_calls_of_a_session_go_to_the_worker_that_opened_it_last(cluster: Cluster) -> None:
    assert [await cluster.open("s", "a"), await cluster.open("t", "b")] == ["a", "b"]
    assert (await cluster.pool.memory("s")).length == 7
    await cluster.open("s", "b")
    await cluster.pool.memory("s")
    await cluster.pool.release(pb.ReleaseRequest(session="s"))
    assert cluster.servicers["a"].calls == ["open s", "memory s", "release s"]
    assert cluster.servicers["b"].calls == ["open t", "open s", "memory s"]


async def test_a_chosen_worker_counts_from_the_next_open(cluster: Cluster) -> None:
    await cluster.open("s", "a")
    assert cluster.pool.choose_worker("s", "b") == "b"
    await cluster.pool.memory("s")
    assert cluster.servicers["a"].calls == ["open s", "memory s"]


async def test_a_fork_is_where_its_parent_is(cluster: Cluster) -> None:
    await cluster.open("s", "b")
    await cluster.pool.fork(pb.ForkRequest(parent="s", spec=pb.SessionSpec(session="child")))
    await cluster.pool.memory("child")
    assert cluster.servicers["b"].calls == ["open s", "fork s", "memory child"]


async def test_a_session_that_this_gateway_never_opened_is_unknown_to_it(cluster: Cluster) -> None:
    with pytest.raises(WorkerRefused) as refused:
        await cluster.pool.memory("s")
    assert refused.value.code == "session_not_open"


async def test_the_owner_is_chosen_while_it_takes_sessions(cluster: Cluster) -> None:
    assert cluster.pool.choose_worker("s", "b") == "b"
    assert cluster.pool.choose_worker("s", "b", ["b"]) == "a"
    cluster.known.found["b"].draining = True
    await cluster.refreshed()
    assert cluster.pool.choose_worker("s", "b") == "a"
    with pytest.raises(WorkerLost, match="no worker that takes"):
        cluster.pool.choose_worker("s", "b", ["a"])


async def test_new_sessions_go_to_both(cluster: Cluster) -> None:
    assert {cluster.pool.choose_worker(f"s_{number}", "") for number in range(50)} == {"a", "b"}


async def test_a_call_that_is_lost_sends_the_next_session_elsewhere(cluster: Cluster) -> None:
    await cluster.open("s", "a")
    await cluster.servers["a"].aclose()
    with pytest.raises(WorkerLost):
        await cluster.pool.memory("s")
    assert cluster.pool.choose_worker("s", "a") == "b"


async def test_calls_in_a_worker_that_vanishes_are_lost_at_once(cluster: Cluster) -> None:
    await cluster.open("s", "a")
    async with aclosing(cluster.pool.turn(pb.TurnRequest(session="s"))) as turn:
        assert (await anext(turn)).token.text == "one"
        del cluster.known.found["a"]
        await cluster.refreshed()
        assert await cluster.names() == ["a", "b"], "it is not in the registry, but it answers"
        cluster.servicers[
            "a"
        ].answers.clear()  # as a machine that is gone: the connection is not even closed
        with pytest.raises(WorkerLost, match="closed"):
            await anext(turn)
    assert await cluster.names() == ["b"]
    with pytest.raises(WorkerLost, match="gone"):
        await cluster.pool.memory("s")


async def test_a_worker_that_joins_is_synced_and_takes_sessions(cluster: Cluster) -> None:
    synced = asyncio.Event()

    async def joined(worker: str) -> None:
        synced.set()

    await cluster.refreshed()
    cluster.pool.on_join(joined)
    async with serving(third := Scripted()) as address:
        cluster.known.add("c", address)
        await synced.wait()
        assert await cluster.names() == ["a", "b", "c"]
        await cluster.open("s", "c")
        assert third.calls == ["open s"]


async def test_a_worker_of_another_model_is_left_out(cluster: Cluster) -> None:
    async with serving(Scripted("other")) as address:
        cluster.known.add("c", address, fingerprint="other")
        await cluster.refreshed()
        assert await cluster.names() == ["a", "b"]


async def test_a_worker_of_another_protocol_is_left_out(cluster: Cluster) -> None:
    with capture_logs() as logs:
        async with serving(Scripted(protocol_version=0)) as address:
            cluster.known.add("c", address, protocol_version=0)
            for _ in range(2):
                await cluster.refreshed()
            assert await cluster.names() == ["a", "b"]
    reasons = [each["reason"] for each in logs if each["event"] == "worker incompatible"]
    assert reasons == ["worker c speaks protocol 1, this gateway 2: upgrade the worker"]


async def test_a_worker_that_returns_with_another_protocol_is_left_out(cluster: Cluster) -> None:
    cluster.known.found["b"].protocol_version = PROTOCOL_VERSION + 1
    await cluster.refreshed()
    cluster.servicers["b"].protocol_version = PROTOCOL_VERSION + 1
    await cluster.refreshed()
    assert await cluster.names() == ["a"]


async def test_a_registry_that_cannot_be_read_changes_nothing(cluster: Cluster) -> None:
    cluster.known.fails = True
    await cluster.refreshed()
    assert await cluster.names() == ["a", "b"]


async def test_a_deletion_goes_to_all_workers(cluster: Cluster) -> None:
    await cluster.pool.delete(pb.DeleteRequest(session="s"))
    assert [each.calls for each in cluster.servicers.values()] == [["delete s"], ["delete s"]]
    assert {name: stats.sessions for name, stats in (await cluster.pool.stats()).items()} == {
        "a": 3,
        "b": 3,
    }
    await cluster.servers["b"].aclose()
    with pytest.raises(WorkerLost, match="of 2 workers 1"):
        await cluster.pool.delete(pb.DeleteRequest(session="t"))
    assert cluster.servicers["a"].calls == ["delete s", "delete t"]
    assert list(await cluster.pool.stats()) == ["a"]
    assert (await cluster.pool.embed(["cat"])).dimensions == 3
    await cluster.servers["a"].aclose()
    for call in (
        cluster.pool.stats(),
        cluster.pool.delete(pb.DeleteRequest(session="u")),
        cluster.pool.embed(["cat"]),
    ):
        with pytest.raises(WorkerLost):
            await call


async def test_a_worker_that_lost_the_session_does_not_hinder_its_deletion(
    cluster: Cluster,
) -> None:
    cluster.servicers["a"].refuses = "stale_epoch"
    await cluster.pool.delete(pb.DeleteRequest(session="s"))
    assert cluster.servicers["b"].calls == ["delete s"]
    cluster.servicers["a"].refuses = "storage_failed"
    with pytest.raises(WorkerRefused):
        await cluster.pool.delete(pb.DeleteRequest(session="s"))


async def test_a_worker_that_was_away_gets_its_releases_when_it_is_back(cluster: Cluster) -> None:
    for session in ("s", "t"):
        await cluster.open(session, "a")
    a = cluster.servicers["a"]
    address = cluster.known.found["a"].address
    await cluster.servers["a"].aclose()
    for session in ("s", "t"):
        with pytest.raises(WorkerLost):
            await cluster.pool.memory(session)
    await cluster.open("s", "a", ["a"])
    with pytest.raises(WorkerLost):
        await cluster.pool.delete(pb.DeleteRequest(session="t"))
    a.calls.clear()
    a.refuses = "storage_failed"
    async with serving(a, int(address.rpartition(":")[2])):
        for _ in range(2):
            await cluster.refreshed()
        assert "delete t" not in a.calls
        a.refuses = ""
        for _ in range(200):
            if len(a.calls) == 2:
                break
            await asyncio.sleep(0.05)
        assert sorted(a.calls) == ["delete t", "release s"]
        await cluster.refreshed()
        assert len(a.calls) == 2
        await cluster.open("s", "a")
        await cluster.refreshed()
    assert cluster.servicers["b"].calls == ["open s", "delete t", "release s"]


async def test_the_limits_hold_in_every_worker(cluster: Cluster) -> None:
    described = await cluster.pool.describe()
    assert (described.model, described.slots, described.max_budget) == ("one", 8, 256)


async def test_workers_at_static_addresses_are_asked_for_their_load() -> None:
    drained = Scripted()
    async with serving(Scripted()) as one, serving(drained) as other:
        pool = await WorkerPool.start(
            StaticRegistry([one, other, "127.0.0.1:1"]),
            WAY.model_copy(update={"look_seconds": 0.3}),
        )
        try:
            records = {record.name: record for record in await pool.workers()}
            assert {name: (each.free_slots, each.draining) for name, each in records.items()} == {
                one: (3, False),
                other: (3, False),
            }
            await drained.health.enter_graceful_shutdown()
            for _ in range(200):
                if pool.choose_worker("s", other) == one:
                    break
                await asyncio.sleep(0.05)
            else:
                pytest.fail("the drain was not noticed")
        finally:
            await pool.close()


async def test_a_pool_starts_without_workers_and_takes_those_that_come() -> None:
    port = free_port()
    address = f"127.0.0.1:{port}"
    way = WAY.model_copy(update={"look_seconds": 0.1})
    pool = await WorkerPool.start(StaticRegistry([address]), way)
    joined = asyncio.Event()

    async def note(_: str) -> None:
        joined.set()

    pool.on_join(note)
    try:
        with pytest.raises(WorkerLost, match=f"the worker {address}"):
            await pool.describe()
        async with serving(Scripted(), port):
            async with asyncio.timeout(60):
                await joined.wait()
            assert (await pool.describe()).model == "one"
    finally:
        await pool.close()


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (0, "speaks protocol 1, this gateway 2: upgrade the worker"),
        (3, "speaks protocol 3, this gateway 2: upgrade the gateway"),
    ],
)
async def test_a_gateway_with_one_incompatible_worker_says_what_to_upgrade(
    version: int, message: str
) -> None:
    async with serving(Scripted(protocol_version=version)) as address:
        pool = await WorkerPool.start(StaticRegistry([address]), WAY)
        try:
            with pytest.raises(WorkerLost, match=message):
                await pool.describe()
        finally:
            await pool.close()
