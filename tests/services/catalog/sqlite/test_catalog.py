"""The file of the SQLite catalog: opening, refusal, deletion, and recovery after a kill."""

import asyncio
import sqlite3
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from kvrecall.domain.errors import (
    CatalogError,
    CatalogVersion,
)
from kvrecall.domain.messages import ToolCall
from kvrecall.domain.sessions.session import (
    Session,
)
from services.catalog.records import RepairDetails, TurnCommit
from services.catalog.sqlite.catalog import SqliteCatalog

MakeSession = Callable[..., Session]
MakeTurn = Callable[..., TurnCommit]


@pytest.fixture
async def catalog(tmp_path: Path) -> AsyncIterator[SqliteCatalog]:
    catalog = await SqliteCatalog.open(tmp_path / "catalog.db")
    yield catalog
    await catalog.close()


async def test_a_deleted_session_is_deleted_from_all_tables(
    catalog: SqliteCatalog,
    tmp_path: Path,
    make_session: MakeSession,
    make_turn: MakeTurn,
    calls: tuple[ToolCall, ToolCall],
) -> None:
    for id in ("s", "other"):
        await catalog.sessions.create(make_session(id), b"", None)
        await catalog.turns.commit(make_turn(id, 1, *calls), 1, None)
    await catalog.sessions.delete("s", None)
    assert await catalog.sessions.get_ids() == ["other"]
    with sqlite3.connect(tmp_path / "catalog.db") as file:
        for table in ("worker_states", "turns", "tool_calls", "repairs"):
            assert {row[0] for row in file.execute(f"SELECT session FROM {table}")} == {"other"}


# What reads the binary column of a table.
READS: Mapping[str, Callable[[SqliteCatalog], Awaitable[object]]] = {
    "worker_states": lambda catalog: catalog.sessions.get_worker_state("s"),
    "turns": lambda catalog: catalog.turns.get_token_ids("s"),
    "repairs": lambda catalog: catalog.repairs.get_latest("s", 9),
}


@pytest.mark.parametrize(
    ("table", "column"),
    [("worker_states", "state"), ("turns", "token_ids"), ("repairs", "positions")],
)
async def test_damaged_bytes_are_an_error_of_the_catalog_wherever_they_lie(
    catalog: SqliteCatalog,
    tmp_path: Path,
    make_session: MakeSession,
    make_turn: MakeTurn,
    table: str,
    column: str,
) -> None:
    await catalog.sessions.create(make_session("s"), b"", None)
    commit = replace(make_turn("s", 1), worker_state=b"state" * 100)
    await catalog.turns.commit(replace(commit, repaired=RepairDetails("", (1, 2, 3))), 1, None)
    with sqlite3.connect(tmp_path / "catalog.db") as file:
        ((stored,),) = file.execute(f"SELECT {column} FROM {table}")
        for place in (0, len(stored) // 2, len(stored) - 1):
            damaged = bytearray(stored)
            damaged[place] ^= 0x10
            file.execute(f"UPDATE {table} SET {column} = ?", (bytes(damaged),))
            file.commit()
            with pytest.raises(CatalogError, match="checksum"):
                await READS[table](catalog)


async def test_a_file_of_another_version_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "catalog.db"
    await (await SqliteCatalog.open(path)).close()
    with sqlite3.connect(path) as file:
        file.execute("PRAGMA user_version = 99")
    with pytest.raises(CatalogVersion, match="version 99"):
        await SqliteCatalog.open(path)


async def test_a_file_of_another_program_is_refused_and_left_alone(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "other.db") as file:
        file.execute("CREATE TABLE mine (x)")
    with pytest.raises(CatalogError, match="another program"):
        await SqliteCatalog.open(tmp_path / "other.db")
    (tmp_path / "text").write_text("hello " * 1000)
    with pytest.raises(CatalogError, match="cannot be opened"):
        await SqliteCatalog.open(tmp_path / "text")
    with pytest.raises(CatalogError, match="cannot be opened"):
        await SqliteCatalog.open(tmp_path)
    assert (tmp_path / "text").read_text() == "hello " * 1000


WRITER = """
import asyncio, sys
from pathlib import Path
from services.catalog.records import RepairDetails, TurnCommit
from kvrecall.domain.messages import Message, ToolCall
from kvrecall.domain.reports import MemoryReport, TurnOutcome
from kvrecall.domain.sessions.session import Session, Turn
from kvrecall.domain.settings.session import SessionSettings
from services.catalog.sqlite.catalog import SqliteCatalog

async def main():
    catalog = await SqliteCatalog.open(Path(sys.argv[1]))
    settings = SessionSettings(64, 8, "snapkv")
    await catalog.sessions.create(Session("s", 1, settings, 0.0, 0.0, 0, MemoryReport()), b"", None)
    calls = tuple(ToolCall(f"c{n}", "look", "{}") for n in range(20))
    for number in range(1, 100_000):
        message = Message("assistant", "x" * 5000)
        outcome = TurnOutcome("s", number, message, "tool_calls", 1, 1, MemoryReport(), (), {})
        messages = (Message("user", "y" * 5000),)
        turn = Turn("s", number, messages, (number,) * 2000, outcome)
        await catalog.turns.commit(TurnCommit(turn, str(number).encode() * 1000, calls), 1, None)
        print(number, flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("acknowledged", [1, 8, 21])
async def test_after_a_kill_every_acknowledged_turn_is_stored_whole(
    tmp_path: Path, acknowledged: int
) -> None:
    path = tmp_path / "catalog.db"
    command = (sys.executable, "-c", WRITER, str(path))
    writer = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert writer.stdout is not None
    last = 0
    while last < acknowledged:
        last = int(await writer.stdout.readline())
    writer.kill()
    last = max([last, *[int(line) for line in (await writer.stdout.read()).split()]])
    await writer.wait()

    catalog = await SqliteCatalog.open(path)
    session = await catalog.sessions.get("s")
    turns = await catalog.turns.get_after("s", 0, 100_000)
    state = await catalog.sessions.get_worker_state("s")
    await catalog.close()
    assert session.turns in (last, last + 1)
    assert [turn.number for turn in turns] == list(range(1, session.turns + 1))
    assert turns[-1].token_ids == (session.turns,) * 2000
    assert state == str(session.turns).encode() * 1000
    assert [call.turn for call in session.calls] == [session.turns] * 20
