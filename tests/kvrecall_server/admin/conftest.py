"""Data directories of stopped services that ran the packaged model."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvrecall.domain.events import TurnFinished
from kvrecall.domain.messages import Message, Sampling
from kvrecall.domain.page_ids import PageId, split_ids
from kvrecall.domain.sessions.request import CreateSession
from kvrecall.domain.turn_request import TurnRequest
from kvrecall_server.app.catalog import open_catalog
from kvrecall_server.app.local.service import build_service
from kvrecall_server.app.settings import Settings
from reference import MODEL_PATH
from services.lifecycle.forks import ForkRequest
from services.service import SessionService

FACTS = (
    "Please note that the extension list says Melnor K4821.",
    "The train to Aldova leaves from platform seven in the morning.",
    "My sister told me that the garden needs more water this year.",
    "Please note that the locker of Tarvik has the number 5093.",
)
TOOL = (
    '{"type": "function", "function": {"name": "lookup", '
    '"parameters": {"type": "object", "properties": {}}}}'
)


def _settings(data: Path, **options: Any) -> Settings:
    """Settings of a small service."""
    chosen = {
        "worker": {"slots": 2, "max_budget": 192, "block_tokens": 64},
        "ram_bytes": 8 << 20,
        **options,
    }
    return Settings(model=str(MODEL_PATH), data=data, **chosen)


@asynccontextmanager
async def _running(data: Path, **options: Any) -> AsyncIterator[SessionService]:
    """The service over a data directory."""
    service = await build_service(_settings(data, **options))
    await service.start()
    try:
        yield service
    finally:
        await service.stop()


async def _say(service: SessionService, session: str, *texts: str, generate: bool = True) -> str:
    """A greedy turn; the answer's text."""
    messages = tuple(Message("user", text) for text in texts)
    return await _ask(service, session, TurnRequest(messages, generate, Sampling(max_tokens=12)))


async def _ask(service: SessionService, session: str, request: TurnRequest) -> str:
    """The reply of a turn as text; empty without generation."""
    progress = [
        item async for item in service.turn(session, request)
    ]  # to its end: only then is the session free
    assert isinstance(progress[-1], TurnFinished)
    message = progress[-1].outcome.message
    return "" if message is None else message.content


async def _talk(service: SessionService, session: str, rounds: int = 2) -> None:
    """Enough small talk to evict rows and to fill several pages."""
    for number in range(rounds):
        await _say(service, session, *(f"{number}. {fact}" for fact in FACTS), generate=False)
        await _say(service, session, "What is the extension of Melnor?")


@dataclass(frozen=True)
class Served:
    """A data directory with a session, its fork, and the fork of a deleted session."""

    data: Path
    parent: str
    child: str
    orphan: str
    deleted: str


async def _serve(data: Path) -> Served:
    async with _running(data) as service:
        new = CreateSession(
            budget=128,
            repair_rows=32,
            method="snapkv",
            seed=7,
            tools=(TOOL,),
            cache_salt="ann",
        )
        parent = (await service.create(new)).id
        await _talk(service, parent)
        child = (await service.fork(parent, ForkRequest())).id
        await _talk(service, child, 1)
        deleted = (await service.create(new)).id
        await _talk(service, deleted)
        orphan = (await service.fork(deleted, ForkRequest())).id
        await _talk(service, orphan, 1)
        await service.delete(deleted)
        return Served(data, parent, child, orphan, deleted)


@pytest.fixture(scope="session")
def served_once(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """The directory that every test gets a copy of."""
    return asyncio.run(_serve(tmp_path_factory.mktemp("served") / "data"))


@pytest.fixture
def served(served_once: Served, tmp_path: Path) -> Served:
    """A copy of the directory for this test."""
    shutil.copytree(served_once.data, tmp_path / "data")
    return Served(
        tmp_path / "data",
        *(getattr(served_once, name) for name in ("parent", "child", "orphan", "deleted")),
    )


@pytest.fixture
def pages_of(served: Served) -> Callable[[], list[Path]]:
    """The segment files, oldest first."""
    return lambda: sorted((served.data / "pages").glob("segment-*.kv"))


@pytest.fixture
def ids_of() -> Callable[[Path, str], list[PageId]]:
    """The ids of a session's pages, as the catalog of a data directory has them."""

    async def read(data: Path, session: str) -> list[PageId]:
        catalog = await open_catalog(_settings(data))
        try:
            return list(split_ids(await catalog.sessions.get_page_ids(session)))
        finally:
            await catalog.close()

    return lambda data, session: asyncio.run(read(data, session))


@pytest.fixture(scope="session")
def settings_of() -> Callable[..., Settings]:
    """A small service's settings, by its data directory."""
    return _settings


@pytest.fixture(scope="session")
def running() -> Callable[..., AbstractAsyncContextManager[SessionService]]:
    """Runs the service over a data directory as a context."""
    return _running


@pytest.fixture(scope="session")
def say() -> Callable[..., Awaitable[str]]:
    """Sends texts to a session in one greedy turn; returns the reply."""
    return _say


@pytest.fixture(scope="session")
def ask() -> Callable[..., Awaitable[str]]:
    """Runs a turn; returns the reply."""
    return _ask


@pytest.fixture(scope="session")
def serve_one() -> Callable[[Path], str]:
    """Creates a session with some turns, in the tiers and catalog of the environment; returns its id."""

    async def serve(data: Path) -> str:
        async with _running(data) as service:
            session = (await service.create(CreateSession(budget=128, method="snapkv", seed=7))).id
            await _talk(service, session)
            return session

    return lambda data: asyncio.run(serve(data))
