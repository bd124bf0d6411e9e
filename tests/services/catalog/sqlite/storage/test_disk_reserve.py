"""A full disk of a SQLite catalog: nothing more is stored, all can be deleted."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from faults.rig.disks import Disk, Tmpfs, new_disk
from kvrecall.domain.errors import StorageFull
from services.catalog.responses import StoredConversation, StoredItem
from services.catalog.sqlite.catalog import SqliteCatalog

MIB = 1 << 20
RESERVE = 8 * MIB


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    made = new_disk(tmp_path / "disk", 48 * MIB)
    if not isinstance(made, Tmpfs):
        made.close()
        pytest.skip("no tmpfs can be mounted here")
    yield made
    made.close()


@pytest.fixture
def path(disk: Disk, tmp_path: Path) -> Path:
    return tmp_path / "disk" / "catalog.sqlite3"


async def fill(catalog: SqliteCatalog, size: int = 3 * MIB) -> list[str]:
    """Create conversations of `size` bytes until one is refused; return those created."""
    created: list[str] = []
    while len(created) < 100:
        id = f"conv_{size}_{len(created)}"
        conversation = StoredConversation(id, "mallory", 1)
        try:
            await catalog.conversations.create(conversation, [StoredItem("msg_1", "x" * size)])
        except StorageFull:
            return created
        created.append(id)
    raise AssertionError("nothing was refused")


async def test_writes_stop_before_the_disk_is_full_and_deletions_make_room(
    path: Path, make_session, make_turn
) -> None:
    catalog = await SqliteCatalog.open(path, RESERVE)
    assert await catalog.has_room()
    await catalog.sessions.create(make_session("s"), b"", None)
    created = await fill(catalog)
    await fill(catalog, 10_000)
    assert len(created) >= 5
    assert not await catalog.has_room()
    with pytest.raises(StorageFull):
        await catalog.turns.commit(make_turn("s", 1), 1, None)
    for id in created[:3]:
        await catalog.conversations.delete(id)
    assert await catalog.has_room()
    await catalog.turns.commit(make_turn("s", 1), 1, None)
    await catalog.close()


async def test_a_disk_that_others_filled_up_can_be_emptied_also_after_a_restart(
    disk: Disk, path: Path, make_session, make_turn
) -> None:
    catalog = await SqliteCatalog.open(path, RESERVE)
    await catalog.sessions.create(make_session("s"), b"", None)
    await catalog.turns.commit(make_turn("s", 1), 1, None)
    created = await fill(catalog)
    disk.fill(0, [])
    assert os.statvfs(path.parent).f_bavail == 0
    assert await catalog.leases.take_over("s", "w") == 2
    for id in created[:2]:
        await catalog.conversations.delete(id)
    assert not await catalog.has_room()
    with pytest.raises(StorageFull):
        await catalog.turns.commit(make_turn("s", 2), 2, None)
    await catalog.close()
    disk.fill(0, [])
    again = await SqliteCatalog.open(path, RESERVE)
    for id in created[2:]:
        await again.conversations.delete(id)
    await again.sessions.delete("s", None)
    assert await again.sessions.get_ids() == []
    disk.free([])
    assert await again.has_room()
    await again.sessions.create(make_session("t"), b"", None)
    await again.close()


async def test_the_reserve_is_taken_again_once_there_is_room(
    disk: Disk, path: Path, make_session
) -> None:
    catalog = await SqliteCatalog.open(path, RESERVE)
    reserve = path.with_name("catalog.sqlite3.reserve")
    await catalog.sessions.create(make_session("s"), b"", None)
    assert reserve.stat().st_size == RESERVE
    disk.fill(0, [])
    await catalog.sessions.delete("s", None)
    assert not reserve.exists()
    disk.free([])
    await catalog.sessions.create(make_session("t"), b"", None)
    assert reserve.stat().st_size == RESERVE
    await catalog.close()


async def test_a_catalog_without_a_reserve_takes_none(tmp_path: Path) -> None:
    catalog = await SqliteCatalog.open(tmp_path / "catalog.sqlite3")
    assert await catalog.has_room()
    await catalog.close()
    assert not (tmp_path / "catalog.sqlite3.reserve").exists()


async def test_a_reserve_that_cannot_be_made_keeps_nobody_from_writing(
    tmp_path: Path, make_session
) -> None:
    path = tmp_path / "catalog.sqlite3"
    (tmp_path / f"{path.name}.reserve").mkdir()
    catalog = await SqliteCatalog.open(path, RESERVE)
    await catalog.sessions.create(make_session("s"), b"", None)
    assert await catalog.has_room()
    await catalog.close()
