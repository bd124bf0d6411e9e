"""Values that were moved or damaged are errors, never another conversation."""

import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from kvrecall.domain.errors import CatalogError, DataKeyDeleted
from kvrecall.domain.sessions.session import Session
from services.catalog.base import Catalog
from services.catalog.encryption.keyring import Keyring
from services.catalog.records import TurnCommit
from services.catalog.redis.catalog import RedisCatalog
from services.catalog.sqlite.catalog import SqliteCatalog

MakeSession = Callable[..., Session]
MakeTurn = Callable[..., TurnCommit]
SAID = "is damaged or was moved: its authentication tag does not match"


async def add_turns(catalog: Catalog, make_session: MakeSession, make_turn: MakeTurn) -> None:
    for tenant in ("ann", "bob"):
        await catalog.sessions.create(make_session(tenant, tenant=tenant), b"", None)
        for number in (1, 2):
            await catalog.turns.commit(make_turn(tenant, number), 1, None)


@pytest.mark.parametrize("column", ["messages", "token_ids", "outcome", "utterance_tokens"])
async def test_a_value_of_another_turn_is_refused(
    column: str, tmp_path: Path, keyring: Keyring, make_session: MakeSession, make_turn: MakeTurn
) -> None:
    path = tmp_path / "catalog.db"
    catalog = await SqliteCatalog.open(path, keyring=keyring)
    await add_turns(catalog, make_session, make_turn)
    with closing(sqlite3.connect(path)) as db, db:
        query = f"SELECT {column} FROM turns WHERE session = 'ann' AND number = 1"
        (moved,) = db.execute(query).fetchone()
        db.execute(f"UPDATE turns SET {column} = ? WHERE session = 'ann' AND number = 2", (moved,))
    with pytest.raises(CatalogError, match=SAID):
        await catalog.turns.get_after("ann", 1, 9)
    assert len(await catalog.turns.get_after("ann", 0, 1)) == 1, "the first turn is whole"
    await catalog.close()


async def test_a_value_of_another_column_is_refused(
    tmp_path: Path, keyring: Keyring, make_session: MakeSession, make_turn: MakeTurn
) -> None:
    path = tmp_path / "catalog.db"
    catalog = await SqliteCatalog.open(path, keyring=keyring)
    await add_turns(catalog, make_session, make_turn)
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE turns SET messages = outcome WHERE session = 'ann'")
    with pytest.raises(CatalogError, match=SAID):
        await catalog.turns.get_after("ann", 0, 9)
    await catalog.close()


async def test_a_value_of_another_tenant_is_refused(
    tmp_path: Path, keyring: Keyring, make_session: MakeSession, make_turn: MakeTurn
) -> None:
    path = tmp_path / "catalog.db"
    catalog = await SqliteCatalog.open(path, keyring=keyring)
    await add_turns(catalog, make_session, make_turn)
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(
            "UPDATE turns SET messages = (SELECT messages FROM turns AS other"
            " WHERE other.session = 'bob' AND other.number = turns.number) WHERE session = 'ann'"
        )
        db.execute(
            "UPDATE data_keys SET wrapped = (SELECT wrapped FROM data_keys WHERE tenant = 'bob')"
            " WHERE tenant = 'ann'"
        )
    with pytest.raises(DataKeyDeleted):
        await catalog.turns.get_after("ann", 0, 9)
    await catalog.close()
    with pytest.raises(CatalogError, match="the data key of tenant 'ann' is damaged"):
        await SqliteCatalog.open(path, keyring=keyring)


@pytest.mark.parametrize("kind", ["turns", "tokens"])
async def test_a_flipped_bit_in_an_entry_of_redis_is_found_and_so_is_an_entry_of_another_turn(
    kind: str,
    open_catalog: Callable[..., Awaitable[RedisCatalog]],
    redis_server: Any,
    redis_url: str,
    keyring: Keyring,
    make_session: MakeSession,
    make_turn: MakeTurn,
) -> None:
    namespace = uuid4().hex
    catalog = await open_catalog(redis_url, namespace, keyring=keyring)
    await add_turns(catalog, make_session, make_turn)
    name = f"{namespace}:{{ann}}:{kind}"
    entry = redis_server.client.lindex(name, 1)
    for at in range(12, len(entry), max(1, len(entry) // 50)):
        damaged = bytearray(entry)
        damaged[at] ^= 1 << (at % 8)
        redis_server.client.lset(name, 1, bytes(damaged))
        with pytest.raises(CatalogError, match=SAID):
            await catalog.turns.get_after("ann", 1, 9)
    redis_server.client.lset(name, 1, redis_server.client.lindex(name, 0))
    with pytest.raises(CatalogError, match=SAID):
        await catalog.turns.get_after("ann", 1, 9)
    redis_server.client.lset(name, 1, entry)
    assert len(await catalog.turns.get_after("ann", 0, 9)) == 2
