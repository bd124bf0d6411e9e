"""A flipped bit in a turn, its texts included, is an error instead of another conversation."""

import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from kvrecall.domain.errors import CatalogError
from kvrecall.domain.sessions.session import Session
from services.catalog.base import Catalog
from services.catalog.records import TurnCommit
from services.catalog.redis.catalog import RedisCatalog
from services.catalog.sqlite.catalog import SqliteCatalog

MakeSession = Callable[..., Session]
MakeTurn = Callable[..., TurnCommit]
CHECKSUM = "do not match their checksum; restore a backup"


async def add_turns(catalog: Catalog, make_session: MakeSession, make_turn: MakeTurn) -> None:
    await catalog.sessions.create(make_session("s"), b"", None)
    for number in (1, 2):
        await catalog.turns.commit(make_turn("s", number), 1, None)
    assert [turn.number for turn in await catalog.turns.get_after("s", 0, 9)] == [1, 2]


@pytest.mark.parametrize(
    ("column", "old", "new"),
    [("messages", "turn 2", "turn 3"), ("outcome", "answer 2", "answer 3")],
)
async def test_a_changed_text_in_a_file_is_found(
    column: str, old: str, new: str, tmp_path: Path, make_session: MakeSession, make_turn: MakeTurn
) -> None:
    path = tmp_path / "catalog.db"
    catalog = await SqliteCatalog.open(path)
    await add_turns(catalog, make_session, make_turn)
    with closing(sqlite3.connect(path)) as db, db:
        changed = db.execute(f"UPDATE turns SET {column} = replace({column}, ?, ?)", (old, new))
        assert changed.rowcount == 2
    with pytest.raises(CatalogError, match=CHECKSUM):
        await catalog.turns.get_after("s", 1, 9)
    assert len(await catalog.turns.get_after("s", 0, 1)) == 1, "the first turn is whole"
    await catalog.close()


@pytest.mark.parametrize("kind", ["turns", "tokens"])
async def test_any_flipped_bit_in_an_entry_of_redis_is_found(
    kind: str,
    open_catalog: Callable[..., Awaitable[RedisCatalog]],
    redis_server: Any,
    redis_url: str,
    make_session: MakeSession,
    make_turn: MakeTurn,
) -> None:
    namespace = uuid4().hex
    catalog = await open_catalog(redis_url, namespace)
    await add_turns(catalog, make_session, make_turn)
    name = f"{namespace}:{{s}}:{kind}"
    entry = redis_server.client.lindex(name, 1)
    for at in range(0, len(entry), max(1, len(entry) // 50)):
        damaged = bytearray(entry)
        damaged[at] ^= 1 << (at % 8)
        redis_server.client.lset(name, 1, bytes(damaged))
        with pytest.raises(CatalogError, match=CHECKSUM):
            await catalog.turns.get_after("s", 1, 9)
    redis_server.client.lset(name, 1, entry)
    assert len(await catalog.turns.get_after("s", 0, 9)) == 2
