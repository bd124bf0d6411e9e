"""A silent worker is left, and holds up neither the watch of the others nor their joins."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import pytest
from google.protobuf.empty_pb2 import Empty
from grpc_health.v1 import health, health_pb2_grpc

from kvrecall.domain.errors import WorkerLost
from kvrecall.protocol import PROTOCOL_VERSION
from kvrecall.protocol.v1 import REFUSAL_CODE, worker_pb2_grpc
from kvrecall.protocol.v1 import worker_pb2 as pb
from services.cluster import membership
from services.cluster.pool import WorkerPool
from services.cluster.settings import WireSettings

# A call to a silent worker ends long after the tests.
WIRE = WireSettings(watch_seconds=0.05, look_seconds=0.5, quick_seconds=600, open_seconds=600)
# The longest wait for what takes about a second: far less than `open_seconds`.
NOTICED_SECONDS = 60.0


class Silenceable(worker_pb2_grpc.WorkerServicer):
    """Answers until it is silenced; then no call gets an answer, and none ends."""

    def __init__(self, catalog: str = "") -> None:
        self.catalog = catalog
        self.answers = asyncio.Event()
        self.answers.set()
        self.health = health.aio.HealthServicer()

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.WorkerInfo:
        if self.catalog not in ("", request.catalog):
            code = ((REFUSAL_CODE, "catalog_mismatch"),)
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION, "another catalog", trailing_metadata=code
            )
        return pb.WorkerInfo(fingerprint="one", slots=4, protocol_version=PROTOCOL_VERSION)

    async def Stats(self, request: Empty, context: Any) -> pb.WorkerStats:
        await self.answers.wait()
        return pb.WorkerStats()

    async def Delete(self, request: pb.DeleteRequest, context: Any) -> Empty:
        await self.answers.wait()
        return Empty()


class Records:
    """A registry whose records stay until a test removes them, as of a worker that renews them."""

    loads = True

    def __init__(self) -> None:
        self.found: dict[str, pb.WorkerRecord] = {}
        self.hangs = False

    async def records(self) -> list[pb.WorkerRecord]:
        if self.hangs:
            await asyncio.Event().wait()
        return list(self.found.values())

    async def close(self) -> None:
        pass

    def add(self, name: str, address: str) -> None:
        self.found[name] = pb.WorkerRecord(
            name=name,
            address=address,
            fingerprint="one",
            free_slots=4,
            protocol_version=PROTOCOL_VERSION,
        )


@asynccontextmanager
async def serving(servicer: Silenceable) -> AsyncIterator[str]:
    """The servicer at an address of this machine."""
    server = grpc.aio.server()
    worker_pb2_grpc.add_WorkerServicer_to_server(servicer, server)
    health_pb2_grpc.add_HealthServicer_to_server(servicer.health, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


class Cluster:
    """Workers a and b, their registry, and the pool."""

    def __init__(self) -> None:
        self.workers = {name: Silenceable() for name in "ab"}
        self.servers = {name: AsyncExitStack() for name in "ab"}
        self.registry = Records()
        self.pool: WorkerPool

    def names(self) -> list[str]:
        return sorted(node.name for node in self.pool._nodes)


async def until(holds: Callable[[], bool]) -> None:
    """Wait until a condition holds; fail after NOTICED_SECONDS."""
    end = time.monotonic() + NOTICED_SECONDS
    while not holds():
        assert time.monotonic() < end, "not noticed in time"
        await asyncio.sleep(0.02)


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    made = Cluster()
    for name, worker in made.workers.items():
        address = await made.servers[name].enter_async_context(serving(worker))
        made.registry.add(name, address)
    made.pool = await WorkerPool.start(made.registry, WIRE)
    await until(lambda: made.names() == ["a", "b"])
    try:
        yield made
    finally:
        await made.pool.close()
        for server in made.servers.values():
            await server.aclose()


async def test_a_worker_that_is_silent_to_a_release_is_left_though_it_renews_its_record(
    cluster: Cluster,
) -> None:
    cluster.workers["b"].answers.clear()
    cluster.pool._membership.schedule_release("b", "s", pb.DeleteRequest(session="s"))
    await until(lambda: cluster.names() == ["a"])
    assert cluster.pool.choose_worker("s", "b") == "a"


async def test_a_silent_worker_delays_neither_the_death_nor_the_join_of_another(
    cluster: Cluster,
) -> None:
    cluster.workers["b"].answers.clear()
    cluster.pool._membership.schedule_release("b", "s", pb.DeleteRequest(session="s"))
    del cluster.registry.found["a"]
    await cluster.servers["a"].aclose()
    async with serving(Silenceable()) as address:
        cluster.registry.add("c", address)
        await until(lambda: "a" not in cluster.names() and "c" in cluster.names())


async def test_a_silent_registry_does_not_end_the_watch(cluster: Cluster) -> None:
    cluster.registry.hangs = True
    node = cluster.pool._membership.by_name["a"]
    await cluster.servers["a"].aclose()
    node.suspect()
    await until(lambda: cluster.names() == ["b"])


async def test_a_worker_of_another_catalog_is_left_out_and_named(cluster: Cluster) -> None:
    registry = Records()
    async with serving(Silenceable(catalog="theirs")) as address:
        registry.add("c", address)
        pool = await WorkerPool.start(registry, WIRE, "ours")
        try:
            with pytest.raises(WorkerLost, match="worker c: another catalog"):
                await pool.describe()
        finally:
            await pool.close()


async def test_scheduled_releases_are_bounded(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "_MAX_RELEASES", 5)
    members = cluster.pool._membership
    for number in range(20):
        members.schedule_release("gone", f"s_{number}", pb.DeleteRequest(session=f"s_{number}"))
    assert list(members._releases["gone"]) == [f"s_{number}" for number in range(15, 20)]
