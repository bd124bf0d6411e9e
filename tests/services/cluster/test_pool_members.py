"""Workers that join the pool, are left out of it, or were never there."""

import asyncio

import pytest
from structlog.testing import capture_logs

from faults.rig.ports import free_port
from kvrecall.domain.errors import WorkerLost
from kvrecall.protocol import PROTOCOL_VERSION
from services.cluster.pool import WorkerPool
from services.cluster.registry import StaticRegistry
from tests.services.cluster.cluster import WAY, Cluster, Scripted, serving


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
        async with serving(Scripted(protocol_version=PROTOCOL_VERSION - 1)) as address:
            cluster.known.add("c", address, protocol_version=PROTOCOL_VERSION - 1)
            for _ in range(2):
                await cluster.refreshed()
            assert await cluster.names() == ["a", "b"]
    reasons = [each["reason"] for each in logs if each["event"] == "worker incompatible"]
    assert reasons == [
        f"worker c speaks protocol {PROTOCOL_VERSION - 1}, this gateway {PROTOCOL_VERSION}: "
        "upgrade the worker"
    ]


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
        (0, f"speaks protocol 0, this gateway {PROTOCOL_VERSION}: upgrade the worker"),
        (
            PROTOCOL_VERSION + 1,
            f"speaks protocol {PROTOCOL_VERSION + 1}, this gateway {PROTOCOL_VERSION}: "
            "upgrade the gateway",
        ),
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
