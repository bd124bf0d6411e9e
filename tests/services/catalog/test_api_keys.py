"""API keys: the same in each kind of catalog."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvrecall.domain.errors import CatalogError
from services.catalog.api_keys import KeyRecord
from services.catalog.sqlite.api_keys import SqliteApiKeys
from services.catalog.sqlite.catalog import SqliteCatalog
from services.catalog.sqlite.storage.database import open_beside

FIRST = KeyRecord("aaaaaaaa", "0f", "p1", "ann", "laptop", ("infer", "admin"), 5.25, 99.5)
SECOND = KeyRecord("bbbbbbbb", "1f", "p1", "", "", (), 4.0)


async def test_a_key_is_found_by_its_id_and_listed_by_age(catalog: Any) -> None:
    keys = catalog.api_keys
    assert not await keys.exist()
    assert await keys.get_all() == []
    for record in (FIRST, SECOND):
        await keys.add(record)
    assert await keys.exist()
    assert await keys.get("aaaaaaaa") == FIRST
    assert await keys.get("cccccccc") is None
    assert await keys.get_all() == [SECOND, FIRST]


async def test_an_id_is_taken_once(catalog: Any) -> None:
    await catalog.api_keys.add(FIRST)
    with pytest.raises(CatalogError, match="already"):
        await catalog.api_keys.add(replace(FIRST, tenant="ben"))
    assert await catalog.api_keys.get_all() == [FIRST]


async def test_a_key_is_revoked_once_and_for_all(catalog: Any) -> None:
    keys = catalog.api_keys
    await keys.add(FIRST)
    assert not await keys.revoke("cccccccc", 7.0)
    assert await keys.get("cccccccc") is None
    assert await keys.revoke("aaaaaaaa", 7.5)
    assert await keys.revoke("aaaaaaaa", 8.0)
    await keys.touch("aaaaaaaa", 9.0)
    found = await keys.get("aaaaaaaa")
    assert found == replace(FIRST, revoked_at=7.5, last_used_at=9.0)
    assert not found.is_usable(6.0)
    assert await keys.exist()


async def test_the_last_use_of_an_unknown_key_leaves_nothing(catalog: Any) -> None:
    await catalog.api_keys.touch("aaaaaaaa", 9.0)
    assert await catalog.api_keys.get_all() == []
    assert await catalog.api_keys.get("aaaaaaaa") is None
    assert not await catalog.api_keys.exist()


def test_a_key_is_usable_until_it_expires() -> None:
    assert FIRST.is_usable(99.4)
    assert not FIRST.is_usable(99.5)
    assert SECOND.is_usable(1e12)


async def test_keys_are_managed_beside_the_process_that_owns_the_file(tmp_path: Path) -> None:
    path = tmp_path / "catalog.db"
    assert await open_beside(path) is None
    owner = await SqliteCatalog.open(path)
    beside = await open_beside(path)
    assert beside is not None
    keys = SqliteApiKeys(beside)
    await keys.add(FIRST)
    assert await owner.api_keys.get_all() == [FIRST]
    await owner.api_keys.touch("aaaaaaaa", 9.0)
    await keys.revoke("aaaaaaaa", 10.0)
    assert await owner.api_keys.get("aaaaaaaa") == replace(FIRST, revoked_at=10.0, last_used_at=9.0)
    await beside.close()
    await owner.close()
