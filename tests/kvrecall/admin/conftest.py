"""Data directories that a real service with the packaged model has made, and stopped services to look at."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvrecall.app.local_service import build_service
from kvrecall.app.settings import Settings
from kvrecall.domain.messages import Message, Sampling
from kvrecall.domain.session_request import CreateSession
from kvrecall.domain.turn_request import TurnRequest
from reference import MODEL_PATH
from services.forks import ForkRequest
from services.service import SessionService
from services.turn_stream import TurnEnded

FACTS = (
    "Please note that the extension list says Melnor K4821.",
    "The train to Aldova leaves from platform seven in the morning.",
    "My sister told me that the garden needs more water this year.",
    "Please note that the locker of Tarvik has the number 5093.",
)
TOOL = '{"type": "function", "function": {"name": "lookup", "parameters": {"type": "object", "properties": {}}}}'


def _settings(data: Path, **options: Any) -> Settings:
    """A small service's settings."""
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
    """A turn's answer as text; empty for one that only remembers."""
    told = [
        progress async for progress in service.turn(session, request)
    ]  # to its end: only then is the session free
    assert isinstance(told[-1], TurnEnded)
    message = told[-1].outcome.message
    return "" if message is None else message.content


async def _talk(service: SessionService, session: str, rounds: int = 2) -> None:
    """So much small talk that rows are evicted and several pages are full."""
    for number in range(rounds):
        await _say(service, session, *(f"{number}. {fact}" for fact in FACTS), generate=False)
        await _say(service, session, "What is the extension of Melnor?")


@dataclass(frozen=True)
class Served:
    """What is in a data directory.

    A session, its fork, and the fork of a session that was deleted.
    """

    data: Path
    parent: str
    child: str
    orphan: str
    deleted: str


async def _serve(data: Path) -> Served:
    async with _running(data) as service:
        new = CreateSession(budget=128, repair_rows=32, method="snapkv", seed=7, tools=(TOOL,))
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
    """The directory that the tests' own are copies of."""
    return asyncio.run(_serve(tmp_path_factory.mktemp("served") / "data"))


@pytest.fixture
def served(served_once: Served, tmp_path: Path) -> Served:
    """A directory of the test's own."""
    shutil.copytree(served_once.data, tmp_path / "data")
    return Served(
        tmp_path / "data",
        *(getattr(served_once, name) for name in ("parent", "child", "orphan", "deleted")),
    )


@pytest.fixture
def pages_of(served: Served) -> Callable[[], list[Path]]:
    """The segment files, oldest first."""
    return lambda: sorted((served.data / "pages").glob("segment-*.kv"))


@pytest.fixture(scope="session")
def settings_of() -> Callable[..., Settings]:
    """A small service's settings, by its data directory."""
    return _settings


@pytest.fixture(scope="session")
def running() -> Callable[..., AbstractAsyncContextManager[SessionService]]:
    """The service over a data directory, as long as one is in it."""
    return _running


@pytest.fixture(scope="session")
def say() -> Callable[..., Awaitable[str]]:
    """Say texts to a session in one greedy turn; the answer."""
    return _say


@pytest.fixture(scope="session")
def ask() -> Callable[..., Awaitable[str]]:
    """Run a turn; its answer."""
    return _ask


@pytest.fixture(scope="session")
def serve_one() -> Callable[[Path], str]:
    """Make one session with some talk in a directory, wherever the environment says that it is kept; its id."""

    async def serve(data: Path) -> str:
        async with _running(data) as service:
            session = (await service.create(CreateSession(budget=128, method="snapkv", seed=7))).id
            await _talk(service, session)
            return session

    return lambda data: asyncio.run(serve(data))
