"""A catalog that vanishes under a running service: the pages stay, and all goes on when it is back."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvrecall.domain.errors import CatalogReplaced
from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.messages import Message
from kvrecall.domain.sessions.request import CreateSession
from kvrecall.domain.turn_request import TurnRequest
from kvrecall_server.app.local.worker import LocalWorkerClient
from kvrecall_server.app.redis import redis_client
from kvrecall_server.app.wiring import build_worker_service
from reference import MODEL_PATH
from services.catalog.redis.catalog import RedisCatalog
from services.catalog.sqlite.catalog import SqliteCatalog
from services.cluster.worker_client import Worker
from services.service import SessionService
from workers.engine.settings import WorkerSettings

LIMITS = ServiceLimits(unknown_page_seconds=1e-3, sweep_seconds=0.1, drain_seconds=5)
OPTIONS = CreateSession(budget=64, method="snapkv", repair_rows=8)


class Vanishing:
    """A Redis or SQLite catalog whose data go and come back."""

    def __init__(self, folder: Path, server: Any = None) -> None:
        self._path = folder / "catalog.db"
        self._server = server
        self._saved: dict[bytes, bytes] = {}

    async def open(self) -> RedisCatalog | SqliteCatalog:
        """Open the catalog."""
        if self._server is None:
            return await SqliteCatalog.open(self._path)
        return await RedisCatalog.open(redis_client(self._server.url), "vanishing")

    def vanish(self) -> None:
        """Empty the server as a restart without its log does, or take the file away."""
        if self._server is None:
            self._path.rename(self._path.with_suffix(".aside"))
            return
        client = self._server.client
        self._saved = {key: client.dump(key) for key in client.keys("*")}
        client.flushall()

    def come_back(self) -> None:
        """Undo `vanish`."""
        if self._server is None:
            self._path.with_suffix(".aside").rename(self._path)
            return
        assert not self._server.client.keys("*"), "nothing was written meanwhile"
        for key, value in self._saved.items():
            self._server.client.restore(key, 0, value)


@pytest.fixture(params=["redis", "sqlite"])
def vanishing(
    request: pytest.FixtureRequest, tmp_path: Path, redis_process: Callable[[], Any]
) -> Vanishing:
    """A catalog of each kind."""
    return Vanishing(tmp_path, redis_process() if request.param == "redis" else None)


@asynccontextmanager
async def service_at(
    data: Path, vanishing: Vanishing
) -> AsyncIterator[tuple[SessionService, Worker]]:
    """A service over a real worker that looks for unknown pages ten times a second."""
    catalog = await vanishing.open()
    settings = WorkerSettings(max_budget=256)
    calls = build_worker_service(MODEL_PATH, data, settings, ram_bytes=1 << 24)
    worker = LocalWorkerClient(calls, catalog.id)
    service = SessionService(worker, catalog, LIMITS)
    await service.start()
    try:
        yield service, worker
    finally:
        await service.stop()


async def say(service: SessionService, session: str, text: str) -> int:
    """Append a message; returns the session's length."""
    request = TurnRequest((Message("user", text),), generate=False)
    [progress async for progress in service.turn(session, request)]
    return (await service.get(session))[0].memory.length


async def test_no_page_goes_and_nothing_is_created_until_the_catalog_is_back(
    vanishing: Vanishing, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with service_at(tmp_path / "data", vanishing) as (service, _):
        sessions = [(await service.create(OPTIONS)).id for _ in range(3)]
        lengths = [
            await say(service, each, "My sister lives in Lisbon. " * 20) for each in sessions
        ]
    async with service_at(tmp_path / "data", vanishing) as (service, worker):
        await service.status.check_catalog()
        vanishing.vanish()
        await service.worker_joined("local")  # so it is swept again
        for refused in (
            lambda: service.create(OPTIONS),
            lambda: service.get(sessions[0]),
            lambda: say(service, sessions[1], "She paints boats."),
            service.status.check_catalog,
        ):
            with pytest.raises(CatalogReplaced):
                await refused()
        while "sweep incomplete" not in capsys.readouterr().out:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        vanishing.come_back()
        await service.status.check_catalog()
        for session, length in zip(sessions, lengths, strict=True):
            assert await say(service, session, "She paints boats.") > length
        (stats,) = (await worker.stats()).values()
        assert stats.lost_pages == 0
        await service.create(OPTIONS)
