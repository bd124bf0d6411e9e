"""A real service over an encrypted catalog: checked, exported, and told apart from one whose key is gone."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from services.catalog.encryption.keyring import make_line

Command = Callable[..., Any]


@pytest.fixture
def encrypted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serve_one: Callable[[Path], str]
) -> tuple[Path, str]:
    """A data directory with a session, encrypted, and the session's id."""
    keys = tmp_path / "keys"
    keys.write_text(f"{make_line('operator')}\n")
    monkeypatch.setenv("KVRECALL_ENCRYPTION__KEYS_FILE", str(keys))
    return tmp_path / "data", serve_one(tmp_path / "data")


def test_its_catalog_has_no_word_and_fsck_and_export_read_all(
    encrypted: tuple[Path, str], command: Command
) -> None:
    data, session = encrypted
    stored = b"".join(file.read_bytes() for file in data.glob("catalog.sqlite3*"))
    assert b"Melnor" not in stored
    checked = command("fsck", "--data", data)
    assert checked.exit_code == 0, checked.output
    file = data.parent / "session.kvs"
    exported = command("export", session, file, "--data", data)
    assert exported.exit_code == 0, exported.output
    assert b"Melnor" in file.read_bytes()


def test_fsck_names_a_session_that_nobody_can_read_and_keeps_its_pages(
    encrypted: tuple[Path, str], command: Command
) -> None:
    data, session = encrypted
    with closing(sqlite3.connect(data / "catalog.sqlite3")) as db, db:
        assert db.execute("DELETE FROM data_keys").rowcount == 1
    checked = command("fsck", "--data", data)
    assert checked.exit_code == 1
    assert f"session {session}" in checked.output
    assert "cannot be decrypted any more; delete it" in " ".join(checked.output.split())
    assert "no session" not in checked.output
