"""Crypto-shredding of a tenant, by the command: its sessions go, and no copy of them can be read."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from kvrecall.domain.errors import DataKeyDeleted
from kvrecall.domain.reports import MemoryReport
from kvrecall.domain.sessions.session import Session
from kvrecall.domain.settings.session import SessionSettings
from kvrecall_server.admin.shredding import shred
from services.catalog.encryption.keyring import Keyring, make_line, parse_keyring
from services.catalog.sqlite.catalog import SqliteCatalog


def make_session(id: str, tenant: str) -> Session:
    settings = SessionSettings(budget=64, repair_rows=8, method="snapkv", tenant=tenant)
    return Session(id, 1, settings, 1.0, 1.0, 0, MemoryReport(budget=64))


@pytest.fixture
def keyring() -> Keyring:
    return parse_keyring(make_line("operator"))


async def test_a_tenant_s_sessions_and_its_key_go_and_others_stay(
    tmp_path: Path, keyring: Keyring
) -> None:
    path = tmp_path / "catalog.db"
    catalog = await SqliteCatalog.open(path, keyring=keyring)
    for number in range(3):
        await catalog.sessions.create(make_session(f"ann {number}", "ann"), b"", None)
    await catalog.sessions.create(make_session("bob", "bob"), b"", None)
    assert await shred(catalog, "ann") == (3, True)
    assert await shred(catalog, "ann") == (0, False)
    assert await catalog.sessions.get_ids() == ["bob"]
    assert (await catalog.sessions.get("bob")).id == "bob"
    await catalog.close()


async def test_a_copy_of_a_session_is_unreadable_and_the_key_is_in_no_file(
    tmp_path: Path, keyring: Keyring
) -> None:
    path = tmp_path / "catalog.db"
    catalog = await SqliteCatalog.open(path, keyring=keyring)
    await catalog.sessions.create(make_session("s", "ann"), b"", None)
    wrapped = await _read_wrapped(catalog)
    assert wrapped in _read_files(tmp_path)
    await catalog.data_keys.delete("ann")
    assert wrapped not in _read_files(tmp_path)
    await catalog.close()
    copy = shutil.copy(path, tmp_path / "copy.db")
    stolen = await SqliteCatalog.open(Path(copy), keyring=keyring)
    with pytest.raises(DataKeyDeleted):
        await stolen.sessions.get("s")
    await stolen.close()


async def _read_wrapped(catalog: SqliteCatalog) -> bytes:
    def read(db: Any) -> bytes:
        return bytes(db.execute("SELECT wrapped FROM data_keys").fetchone()[0])

    return await catalog._database.read(read)


def _read_files(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in folder.glob("catalog.db*"))
