"""A real worker and the catalog: unknown pages go, and pages belong to one catalog."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from kvrecall.domain.errors import CatalogError, UnknownSession, WorkerRefused
from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.messages import Message
from kvrecall.domain.page_ids import split_ids
from kvrecall.domain.sessions.request import CreateSession
from kvrecall.domain.turn_request import TurnRequest
from kvrecall.protocol.v1 import worker_pb2 as pb
from kvrecall_server.app.local.worker import LocalWorkerClient
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

LIMITS = ServiceLimits(unknown_page_seconds=1e-3, sweep_seconds=0.2, drain_seconds=5)
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


async def count_bytes(worker: Worker) -> int:
    """The bytes of pages in the worker's files."""
    (stats,) = (await worker.stats()).values()
    return stats.tiers["nvme"].bytes


async def wait_for_bytes(worker: Worker, count: int) -> None:
    for _ in range(600):
        if await count_bytes(worker) == count:
            return
        await asyncio.sleep(0.05)
    pytest.fail(f"there are {await count_bytes(worker)} bytes, not {count}")


async def test_pages_of_a_turn_that_was_not_committed_are_deleted(
    worker_at: WorkerAt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with service_at(worker_at, tmp_path / "data", tmp_path / "c.db") as (
        service,
        catalog,
        worker,
    ):
        session = (await service.create(OPTIONS)).id
        length = await say(service, session, "My sister lives in Lisbon. " * 30)
        held = await count_bytes(worker)
        assert held

        async def fail(*_: object) -> None:
            raise CatalogError("no space left")

        with monkeypatch.context() as patch:
            patch.setattr(catalog.turns, "commit", fail)
            with pytest.raises(CatalogError):
                await say(service, session, "She paints boats. " * 30)
        await asyncio.sleep(0.5)
        assert await count_bytes(worker) > held, "a worker keeps what its open sessions have"
        await worker.delete(pb.DeleteRequest(session=session))
        await wait_for_bytes(worker, held)
        assert await say(service, session, "She paints boats.") > length
        (stats,) = (await worker.stats()).values()
        assert stats.lost_pages == 0


async def test_pages_of_a_deleted_session_are_deleted_but_for_those_of_others(
    worker_at: WorkerAt, tmp_path: Path
) -> None:
    async with service_at(worker_at, tmp_path / "data", tmp_path / "c.db") as (
        service,
        catalog,
        worker,
    ):
        sessions = [(await service.create(OPTIONS)).id for _ in range(2)]
        for session in sessions:
            await say(service, session, "My sister lives in Lisbon. " * 30)
        first, second = [split_ids(await catalog.sessions.get_page_ids(id)) for id in sessions]
        assert set(first) & set(second), "both begin in the same words"
        page_bytes = await count_bytes(worker) // len({*first, *second})
        await service.delete(sessions[0])
        await wait_for_bytes(worker, page_bytes * len(second))
        await service.delete(sessions[1])
        await wait_for_bytes(worker, 0)


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
        await wait_for_bytes(worker, 0)
