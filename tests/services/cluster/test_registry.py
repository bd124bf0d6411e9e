"""Workers register themselves in a real Redis, and gateways find them there until they expire."""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import uuid4

import pytest
from structlog.testing import capture_logs

from kvrecall.domain.errors import RegistryError
from kvrecall.protocol.v1 import WORKER_RECORD_SECONDS, worker_key
from kvrecall.protocol.v1 import worker_pb2 as pb
from kvrecall_server.app.redis import redis_client
from services.cluster.pool import WorkerPool
from services.cluster.registry import RedisRegistry
from services.cluster.settings import WireSettings
from tests.every_redis import every_redis
from workers.rpc.registration import Registration


@pytest.fixture(params=["redis_url", "redis_cluster_url"])
def url(request: pytest.FixtureRequest) -> str:
    """One server, and a cluster of them."""
    return str(request.getfixturevalue(request.param))


def registration(url: str, namespace: str, name: str) -> Registration:
    """How a worker of that name announces itself."""

    def record(draining: bool) -> pb.WorkerRecord:
        return pb.WorkerRecord(name=name, address=f"{name}:1", free_slots=3, draining=draining)

    return Registration(redis_client(url), namespace, name, record)


async def found(registry: RedisRegistry) -> list[tuple[str, bool]]:
    """Names, and who drains."""
    return [(record.name, record.draining) for record in await registry.records()]


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    for _ in range(400):
        if await holds():
            return
        await asyncio.sleep(0.05)
    pytest.fail("it did not come to be")


async def test_workers_join_drain_and_leave(url: str) -> None:
    namespace = uuid4().hex
    registry = RedisRegistry(redis_client(url), namespace)
    assert await found(registry) == []
    one = registration(url, namespace, "one")
    two = registration(url, namespace, "two")
    await one.start()
    await two.start()
    assert await found(registry) == [("one", False), ("two", False)]
    await one.drain()
    assert await found(registry) == [("one", True), ("two", False)]
    await one.stop()
    assert await found(registry) == [("two", False)]
    await two.stop()
    assert await found(registry) == []
    await registry.close()


@every_redis
async def test_a_record_expires_unless_its_worker_renews_it(
    redis_url: str,
) -> None:
    namespace = uuid4().hex
    registry = RedisRegistry(redis_client(redis_url), namespace)
    one = registration(redis_url, namespace, "one")
    two = registration(redis_url, namespace, "two")
    await one.start()
    await two.start()
    assert one._task is not None
    one._task.cancel()  # as a process that was killed or stopped

    async def is_gone() -> bool:
        return await found(registry) == [("two", False)]

    await until(is_gone)
    client: Any = redis_client(redis_url)
    assert 0 < await client.pttl(worker_key(namespace, "two")) <= 1000 * WORKER_RECORD_SECONDS
    await one.drain()  # it was stopped only, and goes on
    assert await found(registry) == [("one", True), ("two", False)]
    for each in (one, two):
        await each.stop()
    await client.aclose()
    await registry.close()


@every_redis
async def test_deployments_on_one_redis_do_not_see_each_other(redis_url: str) -> None:
    ours = uuid4().hex
    theirs = uuid4().hex
    one = registration(redis_url, ours, "one")
    await one.start()
    registry = RedisRegistry(redis_client(redis_url), theirs)
    assert await found(registry) == []
    await registry.close()
    await one.stop()


@every_redis
async def test_an_unreachable_redis_stops_no_worker(redis_process: Callable[..., Any]) -> None:
    server = redis_process()
    namespace = uuid4().hex
    one = registration(server.url, namespace, "one")
    registry = RedisRegistry(redis_client(server.url), namespace)
    await one.start()
    server.kill()
    with pytest.raises(RegistryError, match="cannot be read"):
        await registry.records()
    await one.drain()
    server.start()

    async def is_back() -> bool:
        return await found(registry) == [("one", True)]

    await until(is_back)
    await one.stop()
    await registry.close()


async def test_a_registry_that_is_silent_is_logged_at_its_end_and_its_return(
    redis_process: Callable[..., Any],
) -> None:
    """A gateway reads it many times a minute."""
    server = redis_process()
    settings = WireSettings(watch_seconds=0.02, look_seconds=0.2)
    with capture_logs() as logs:
        pool = await WorkerPool.start(RedisRegistry(redis_client(server.url), "silent"), settings)

        def count(event: str) -> int:
            return sum(each["event"] == event for each in logs)

        async def is_read_again() -> bool:
            return count("registry read again") == count("registry unread")

        try:
            for _ in range(2):
                server.signal(signal.SIGSTOP)
                await asyncio.sleep(2)  # some ten attempts
                server.signal(signal.SIGCONT)
                await until(is_read_again)
        finally:
            server.signal(signal.SIGCONT)
            await pool.close()
    assert (count("registry unread"), count("registry read again")) == (2, 2)
