"""Services whose worker has two ranks: this process, and one that follows it."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvrecall.domain.sessions.request import CreateSession
from kvrecall_server.app.access import build_access
from kvrecall_server.app.catalog import open_catalog
from kvrecall_server.app.local.worker import LocalWorkerClient
from kvrecall_server.app.rank_storage import list_ranks
from kvrecall_server.app.relay import build_relay
from kvrecall_server.app.settings import Settings
from kvrecall_server.app.wiring import build_worker
from kvstore.errors import DirectoryLockedError
from kvstore.fsck import locked_directory
from services.service import SessionService
from tests.kvrecall_server.admin.conftest import (
    _running,
    _say,
    _settings,
    _talk,
    ids_of,
    serve_one,
)
from tests.workers.parallel.conftest import group
from tests.workers.parallel.follower_plan import WiredPlan
from workers.parallel.process_group import ProcessGroup

__all__ = ["group", "ids_of", "serve_one"]

Running = Callable[..., AbstractAsyncContextManager[SessionService]]
QUESTION = "What is the extension of Melnor?"


@pytest.fixture(scope="module")
def running(group: ProcessGroup, until_free: Callable[[Path], None]) -> Running:
    """Runs a service over a data directory, on two ranks."""

    @asynccontextmanager
    async def run(data: Path, **options: Any) -> AsyncIterator[SessionService]:
        settings: Settings = _settings(data, tensor_parallel=2, **options)
        credentials = {name: text for name, text in os.environ.items() if name.startswith("AWS_")}
        group.lead(WiredPlan(settings, credentials))
        calls = build_worker(settings, group=group)
        catalog = await open_catalog(settings)
        client = LocalWorkerClient(calls, catalog.id)
        access, relay = build_access(settings, catalog), build_relay(settings)
        service = SessionService(client, catalog, settings.service, access, relay, settings.sandbox)
        await service.start()
        try:
            yield service
        finally:
            await service.stop()
            until_free(data)

    return run


@pytest.fixture(scope="session")
def until_free(until: Callable[..., None]) -> Callable[[Path], None]:
    """Waits until both ranks have closed their stores."""

    def is_free(data: Path) -> bool:
        try:
            for rank in list_ranks(2):
                with locked_directory(rank.find_folder(data) / "pages"):
                    pass
        except DirectoryLockedError:
            return False
        return True

    return lambda data: until(lambda: is_free(data), "both ranks have closed their stores")


@pytest.fixture(scope="module")
def serve(running: Running) -> Callable[[Path], str]:
    """Creates a session with some turns, on two ranks; returns its id."""

    async def run(data: Path) -> str:
        async with running(data) as service:
            session = (await service.create(CreateSession(budget=128, method="snapkv", seed=7))).id
            await _talk(service, session)
            return session

    return lambda data: asyncio.run(run(data))


@pytest.fixture
def answer(running: Running) -> Callable[..., str]:
    """Runs a service for one turn, on `ranks` ranks; returns the reply."""

    async def run(data: Path, session: str, ranks: int) -> str:
        async with running(data) if ranks > 1 else _running(data) as service:
            return await _say(service, session, QUESTION)

    return lambda data, session, ranks=2: asyncio.run(run(data, session, ranks))


@pytest.fixture
def reply(answer: Callable[..., str], tmp_path: Path) -> Callable[[Path, str], str]:
    """What a session replies next, in a copy of its data directory."""

    def ask(data: Path, session: str) -> str:
        shutil.copytree(data, tmp_path / "asked")
        return answer(tmp_path / "asked", session)

    return ask
