"""What the SQLite catalog keeps, for how long, for whom, and what its operations cost."""

import asyncio
import random
import sqlite3
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvrecall.domain.errors import CatalogError
from kvrecall.domain.page_ids import join_ids
from kvrecall.domain.sessions.session import Session
from services.catalog.records import (
    ForkCommit,
    IdempotencyKey,
    IdempotencyRecord,
    TurnCommit,
)
from services.catalog.sqlite import idempotency
from services.catalog.sqlite.catalog import SqliteCatalog
from services.catalog.sqlite.storage.database import Database
from tests.services.catalog.page_chains import name_chain

MakeSession = Callable[..., Session]
MakeTurn = Callable[..., TurnCommit]
HOUR = 3600.0


@pytest.fixture
async def catalog(tmp_path: Path) -> AsyncIterator[SqliteCatalog]:
    catalog = await SqliteCatalog.open(tmp_path / "catalog.db")
    yield catalog
    await catalog.close()


def read_value(path: Path, query: str) -> int:
    with sqlite3.connect(path) as file:
        return int(file.execute(query).fetchone()[0])


async def test_idempotency_records_expire_by_age_whatever_other_tenants_store(
    catalog: SqliteCatalog,
    tmp_path: Path,
    make_session: MakeSession,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1e9
    monkeypatch.setattr(Database, "now", lambda self: now)
    monkeypatch.setattr(idempotency, "_RETAINED_RECORDS", 20)

    async def create(id: str) -> IdempotencyKey:
        key = IdempotencyKey("POST /sessions", id, "body")
        await catalog.sessions.create(make_session(id), b"", IdempotencyRecord(key, id))
        return key

    first = await create("first")
    now += 23 * HOUR
    others = [await create(f"other {number}") for number in range(20)]
    assert await catalog.idempotency.get(first) == "first"
    now += HOUR
    others.append(await create("one more"))
    assert await catalog.idempotency.get(first) is None
    assert [await catalog.idempotency.get(key) for key in others] == [key.key for key in others]
    await catalog.sessions.delete("first", None)
    assert await create("first") == first
    assert await catalog.idempotency.get(first) == "first"
    now += 23 * HOUR
    await create("last")
    path = tmp_path / "catalog.db"
    assert read_value(path, "SELECT count(*) FROM idempotency_records") == 20


async def test_a_clock_that_is_set_forward_makes_no_catalog_forget_its_latest_responses(
    catalog: SqliteCatalog, make_session: MakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1e9
    monkeypatch.setattr(Database, "now", lambda self: now)
    keys = [IdempotencyKey("POST /sessions", f"s-{number}", "body") for number in range(20)]
    for key in keys:
        await catalog.sessions.create(make_session(key.key), b"", IdempotencyRecord(key, key.key))
        now += 1000 * HOUR
    assert [await catalog.idempotency.get(key) for key in keys] == [key.key for key in keys]


async def test_a_file_in_use_is_refused_until_it_is_closed(
    catalog: SqliteCatalog, tmp_path: Path
) -> None:
    with pytest.raises(CatalogError, match="in use by another process; stop it"):
        await SqliteCatalog.open(tmp_path / "catalog.db")
    assert await catalog.sessions.get_ids() == []
    await catalog.close()
    again = await SqliteCatalog.open(tmp_path / "catalog.db")
    await again.close()


HOLDER = """
import asyncio, sys
from pathlib import Path
from services.catalog.sqlite.catalog import SqliteCatalog

async def main():
    catalog = await SqliteCatalog.open(Path(sys.argv[1]))
    print("open", flush=True)
    await asyncio.sleep(3600)
    await catalog.close()

asyncio.run(main())
"""


async def test_the_file_of_a_killed_process_can_be_opened(tmp_path: Path) -> None:
    path = tmp_path / "catalog.db"
    holder = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HOLDER, str(path), stdout=asyncio.subprocess.PIPE
    )
    assert holder.stdout is not None
    assert await holder.stdout.readline() == b"open\n"
    with pytest.raises(CatalogError, match="in use"):
        await SqliteCatalog.open(path)
    holder.kill()
    await holder.wait()
    await (await SqliteCatalog.open(path)).close()


@pytest.mark.parametrize("seed", range(3))
async def test_a_tenant_s_sum_is_that_of_its_sessions_after_any_changes(
    catalog: SqliteCatalog,
    tmp_path: Path,
    make_session: MakeSession,
    make_turn: MakeTurn,
    seed: int,
) -> None:
    rng = random.Random(seed)
    turns: dict[str, int] = {}
    for number in range(60):
        action = rng.choice(["create", "turn", "fork", "delete"])
        chosen = rng.choice([*turns]) if turns else ""
        if action == "create" or not chosen:
            tenant = rng.choice(["", "ann", "bob"])
            await catalog.sessions.create(make_session(f"s{number}", tenant=tenant), b"", None)
            turns[f"s{number}"] = 0
        elif action == "turn":
            turns[chosen] += 1
            await catalog.turns.commit(make_turn(chosen, turns[chosen]), 1, None)
        elif action == "fork":
            child = replace(await catalog.sessions.get(chosen), id=f"f{number}")
            await catalog.sessions.fork(ForkCommit(child, chosen, turns[chosen], b""), None)
            turns[child.id] = turns[chosen]
        else:
            await catalog.sessions.delete(chosen, None)
            del turns[chosen]
    found = [await catalog.sessions.get(id) for id in turns]
    for tenant in ("", "ann", "bob", "unknown"):
        lengths = [each.memory.length for each in found if each.settings.tenant == tenant]
        assert (await catalog.sessions.get_use(tenant)).tokens == sum(lengths)
    tenants = len({each.settings.tenant for each in found})
    assert read_value(tmp_path / "catalog.db", "SELECT count(*) FROM tenants") == tenants
    assert await catalog.sessions.get_ids() == sorted(turns)


@pytest.fixture
def count_steps(
    catalog: SqliteCatalog,
) -> Callable[[Awaitable[Any]], Awaitable[int]]:
    """count_steps(operation): how many times 10 instructions SQLite ran for it."""

    async def count(operation: Awaitable[Any]) -> int:
        steps = 0

        def step() -> int:
            nonlocal steps
            steps += 1
            return 0

        database = catalog._database
        await database.read(lambda db: db.set_progress_handler(step, 10))
        await operation
        await database.read(lambda db: db.set_progress_handler(None, 0))
        return steps

    return count


async def test_deletions_and_quotas_cost_the_same_for_any_number_of_sessions(
    catalog: SqliteCatalog,
    count_steps: Callable[[Awaitable[Any]], Awaitable[int]],
    make_session: MakeSession,
    make_turn: MakeTurn,
) -> None:
    async def add_children(first: int, count: int) -> None:
        """Delete sessions whose pages forks still have."""
        for number in range(first, first + count):
            parent, child = f"parent {number}", f"child {number}"
            page_ids = join_ids(name_chain([0, number]))
            await catalog.sessions.create(make_session(parent), b"", None)
            turn = replace(make_turn(parent, 1), page_ids=page_ids)
            await catalog.turns.commit(turn, 1, None)
            fork = replace(await catalog.sessions.get(parent), id=child)
            await catalog.sessions.fork(ForkCommit(fork, parent, 1, b"", page_ids), None)
            await catalog.sessions.delete(parent, None)

    async def measure(number: int) -> tuple[int, int]:
        quota = await count_steps(catalog.sessions.get_use(""))
        deletion = await count_steps(catalog.sessions.delete(f"child {number}", None))
        return quota, deletion

    await add_children(0, 20)
    few = await measure(0)
    await add_children(20, 180)
    many = await measure(100)
    assert name_chain([0, 100])[1] in await catalog.pages.get_dead(9)
    assert [more <= 1.5 * less + 5 for more, less in zip(many, few, strict=True)] == [True, True]


async def test_ids_are_listed_in_parts_so_that_others_do_not_wait(
    catalog: SqliteCatalog, make_session: MakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.catalog.sqlite.sessions._IDS_AT_ONCE", 3)
    for number in range(10):
        await catalog.sessions.create(make_session(f"s{number}", created=number // 4), b"", None)
    assert await catalog.sessions.get_ids() == [f"s{number}" for number in range(10)]
