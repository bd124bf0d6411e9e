"""Each kind of catalog, and sessions and turns to store in it."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from faults.rig.redis_servers import OTHER_KINDS
from kvrecall.domain.messages import Message, ToolCall
from kvrecall.domain.reports import (
    Fidelity,
    MemoryReport,
    RepairReport,
    ReselectionReport,
    RetrievalReport,
    TurnOutcome,
)
from kvrecall.domain.sessions.session import Session, Turn
from kvrecall.domain.settings.session import SessionSettings
from kvrecall_server.app.redis import redis_client
from services.catalog.base import Catalog
from services.catalog.encryption.cipher import OVERHEAD_BYTES
from services.catalog.encryption.keyring import Keyring, make_line, parse_keyring
from services.catalog.records import TurnCommit
from services.catalog.redis.catalog import RedisCatalog
from services.catalog.sqlite.catalog import SqliteCatalog

MEMORY = MemoryReport(7, 64, 7, 8, 96, 448, 0, 2, (7, 6), (8, 8), (96, 96), {"ram": 10}, True)
REPAIR = RepairReport(
    "tool_call",
    3,
    7,
    2,
    0.5,
    candidates=9,
    demoted=1,
    truncated=True,
    bytes_read=5,
    in_pause=True,
)


@pytest.fixture
def keyring() -> Keyring:
    """An operator's keys: one."""
    return parse_keyring(make_line("operator"))


CATALOGS = ["sqlite", "encrypted-sqlite", "redis", "encrypted-redis", "cluster"]


@pytest.fixture(params=[*CATALOGS, *OTHER_KINDS])
async def catalog(
    request: pytest.FixtureRequest, tmp_path: Path, keyring: Keyring
) -> AsyncIterator[Catalog]:
    """An empty catalog: in a file, on one server of each kind, and on a cluster of six; two are encrypted."""
    catalog: Catalog
    keys = keyring if request.param.startswith("encrypted") else None
    if request.param.endswith("sqlite"):
        catalog = await SqliteCatalog.open(tmp_path / "catalog.db", keyring=keys)
    else:
        url = find_url(request)
        catalog = await RedisCatalog.open(redis_client(url), uuid4().hex, keyring=keys)
    yield catalog
    await catalog.close()


def find_url(request: pytest.FixtureRequest) -> str:
    """Return the URL of the servers that a parameter of `catalog` names."""
    if request.param in OTHER_KINDS:
        return str(request.getfixturevalue("redis_servers")(request.param).url)
    is_cluster = request.param == "cluster"
    return str(request.getfixturevalue("redis_cluster_url" if is_cluster else "redis_url"))


@pytest.fixture
def overhead(request: pytest.FixtureRequest) -> int:
    """The bytes that a value of `catalog` takes more than it has."""
    is_encrypted = request.node.callspec.params["catalog"].startswith("encrypted")
    return OVERHEAD_BYTES if is_encrypted else 0


@pytest.fixture
async def open_catalog() -> AsyncIterator[Callable[..., Awaitable[RedisCatalog]]]:
    """open_catalog(url, namespace, **settings): a catalog on Redis, closed after the test."""
    opened: list[RedisCatalog] = []

    async def open_one(url: str, namespace: str = "", **settings: Any) -> RedisCatalog:
        opened.append(
            await RedisCatalog.open(redis_client(url, 1.0), namespace or uuid4().hex, **settings)
        )
        return opened[-1]

    yield open_one
    for catalog in opened:
        await catalog.close()


@pytest.fixture
def memory() -> MemoryReport:
    """The memory report of every turn of `make_turn`."""
    return MEMORY


@pytest.fixture
def repair() -> RepairReport:
    """The repair that every turn of `make_turn` ran itself."""
    return REPAIR


@pytest.fixture
def calls() -> tuple[ToolCall, ToolCall]:
    """Two calls of one assistant message."""
    return ToolCall("a", "look", '{"n": 1}'), ToolCall("b", "look", '{"n": 2}')


@pytest.fixture
def make_session() -> Callable[..., Session]:
    """make_session(id, created, **settings): a session without a turn."""

    def make(id: str, created: float = 1.0, **settings: Any) -> Session:
        values: dict[str, Any] = {"budget": 64, "repair_rows": 8, "method": "snapkv", **settings}
        chosen = SessionSettings(**values)
        return Session(id, 1, chosen, created, created, 0, MemoryReport(budget=64))

    return make


@pytest.fixture
def make_turn() -> Callable[..., TurnCommit]:
    """make_turn(session, number, *calls): a turn with its own repair that ended on the calls."""

    def make(session: str, number: int, *calls: ToolCall) -> TurnCommit:
        message = Message("assistant", f"answer {number}", calls)
        outcome = TurnOutcome(
            session,
            number,
            message,
            "stop",
            3,
            2,
            MEMORY,
            (REPAIR,),
            {"decode": 0.5},
            Fidelity(5, 0.25, 0.5),
            REPAIR,
            reselections=ReselectionReport(2, 40, 30, 0.25),
            retrieval=RetrievalReport(5, 80, 0.125),
        )
        messages = (Message("user", f"turn {number}"),)
        turn = Turn(session, number, messages, (1, 2, 2**32 - 1), outcome, (1, 2))
        return TurnCommit(turn, b"state %d" % number, calls)

    return make
