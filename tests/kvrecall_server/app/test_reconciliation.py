"""A real worker and the catalog: unknown sessions go, and pages belong to one catalog."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from kvrecall.domain.errors import UnknownSession, WorkerRefused
from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.messages import Message
from kvrecall.domain.sessions.request import CreateSession
from kvrecall.domain.turn_request import TurnRequest
from kvrecall_server.app.local_worker import LocalWorkerClient
from kvrecall_server.app.wiring import build_worker_service
from reference import MODEL_PATH
from services.catalog.sqlite.catalog import SqliteCatalog
from services.cluster.grpc_client import GrpcWorkerClient
from services.cluster.settings import WireSettings
from services.cluster.worker_client import Worker
from services.service import SessionService
from workers.engine.settings import WorkerSettings
from workers.rpc.server import WorkerServer
from workers.rpc.service import WorkerService
from workers.rpc.settings import ServerSettings

LIMITS = ServiceLimits(orphan_seconds=0.5, reconcile_seconds=0.2, drain_seconds=5)
OPTIONS = CreateSession(budget=64, method="snapkv", repair_rows=8)
WorkerAt = Callable[[Path, str], AbstractAsyncContextManager[Worker]]


def calls_at(data: Path) -> WorkerService:
    """The calls of the packaged model."""
    settings = WorkerSettings(max_budget=256)
    return build_worker_service(MODEL_PATH, data, settings, ram_bytes=1 << 24)


@asynccontextmanager
async def inside(data: Path, catalog: str) -> AsyncIterator[Worker]:
    """A worker in this process, which the service closes."""
    yield LocalWorkerClient(calls_at(data), catalog)


@asynccontextmanager
async def over_grpc(data: Path, catalog: str) -> AsyncIterator[Worker]:
    """A worker behind a server and a connection of this machine."""
    calls = calls_at(data)
    server = WorkerServer(ServerSettings(listen="127.0.0.1:0"))
    await server.start(calls)
    try:
        yield GrpcWorkerClient(WireSettings(worker=server.address), catalog)
    finally:
        await server.stop()
        await calls.close()


@pytest.fixture(params=[inside, over_grpc])
def worker_at(request: pytest.FixtureRequest) -> WorkerAt:
    """Both ways to a worker."""
    way: WorkerAt = request.param
    return way


@asynccontextmanager
async def service_at(
    worker_at: WorkerAt, data: Path, catalog_path: Path
) -> AsyncIterator[tuple[SessionService, SqliteCatalog, Worker]]:
    """A service over a real worker and a real catalog."""
    catalog = await SqliteCatalog.open(catalog_path)
    async with worker_at(data, catalog.id) as worker:
        service = SessionService(worker, catalog, LIMITS)
        try:
            await service.start()
            yield service, catalog, worker
        finally:
            await service.stop()


async def say(service: SessionService, session: str, text: str) -> int:
    """Append a message; returns the session's length."""
    request = TurnRequest((Message("user", text),), generate=False)
    [progress async for progress in service.turn(session, request)]
    return (await service.get(session))[0].memory.length


async def count_sessions(worker: Worker) -> int:
    (stats,) = (await worker.stats()).values()
    return stats.sessions


async def wait_for_sessions(worker: Worker, count: int) -> None:
    for _ in range(600):
        if await count_sessions(worker) == count:
            return
        await asyncio.sleep(0.05)
    pytest.fail(f"the worker holds {await count_sessions(worker)} sessions, not {count}")


async def test_a_creation_cancelled_between_its_two_steps_leaves_nothing_in_the_worker(
    worker_at: WorkerAt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with service_at(worker_at, tmp_path / "data", tmp_path / "c.db") as (
        service,
        catalog,
        worker,
    ):
        kept = (await service.create(OPTIONS)).id
        length = await say(service, kept, "My sister lives in Lisbon.")

        async def killed(*_: object) -> None:
            raise asyncio.CancelledError

        with monkeypatch.context() as patch:
            patch.setattr(catalog.sessions, "create", killed)
            with pytest.raises(asyncio.CancelledError):
                await service.create(OPTIONS)
        assert await count_sessions(worker) == 2
        await wait_for_sessions(worker, 1)
        assert await say(service, kept, "She paints boats.") > length


async def test_an_empty_catalog_does_not_delete_the_pages_of_another(
    worker_at: WorkerAt, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    async with service_at(worker_at, data, tmp_path / "c.db") as (service, _, worker):
        session = (await service.create(OPTIONS)).id
        length = await say(service, session, "My sister lives in Lisbon. " * 30)
    with pytest.raises(WorkerRefused, match="belong to the sessions of catalog") as refused:
        async with service_at(worker_at, data, tmp_path / "empty.db"):
            pass
    assert refused.value.code == "catalog_mismatch"
    assert str(data / "pages" / "catalog-id") in refused.value.message
    async with service_at(worker_at, data, tmp_path / "c.db") as (service, _, worker):
        assert await say(service, session, "She paints boats.") > length
        (stats,) = (await worker.stats()).values()
        assert stats.lost_pages == 0


async def test_the_pages_go_to_another_catalog_once_their_mark_is_removed(
    worker_at: WorkerAt, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    async with service_at(worker_at, data, tmp_path / "c.db") as (service, _, worker):
        session = (await service.create(OPTIONS)).id
        await say(service, session, "My sister lives in Lisbon. " * 30)
    (data / "pages" / "catalog-id").unlink()
    async with service_at(worker_at, data, tmp_path / "other.db") as (service, _, worker):
        with pytest.raises(UnknownSession):
            await service.get(session)
        for _ in range(600):
            (stats,) = (await worker.stats()).values()
            if not stats.tiers["nvme"].bytes:
                break
            await asyncio.sleep(0.05)
        else:
            pytest.fail("the pages of unknown sessions stay")
