"""`kvrecall encryption`: a new key is a line of the file, and a shredded tenant begins with nothing."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvrecall.domain.reports import MemoryReport
from kvrecall.domain.sessions.session import Session
from kvrecall.domain.settings.session import SessionSettings
from kvrecall_server.app.catalog import open_catalog
from kvrecall_server.app.encryption import load_keyring
from kvrecall_server.app.errors import CannotServe
from kvrecall_server.app.settings import Settings
from kvrecall_server.cli.commands import app
from services.catalog.encryption.keyring import parse_keyring


@pytest.fixture
def keys_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVRECALL_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("KVRECALL_ENCRYPTION__KEYS_FILE", str(tmp_path / "keys"))
    return tmp_path / "keys"


def run(*words: str, input: str | None = None) -> Any:
    return CliRunner().invoke(app, ["encryption", *words], input=input)


def test_a_new_key_is_a_line_of_the_file_that_the_setting_names(keys_file: Path) -> None:
    keys_file.write_text(run("new-key", "2026-11").output)
    keyring = load_keyring(Settings())
    assert keyring is not None
    assert keyring.current == "2026-11"
    assert keyring == parse_keyring(keys_file.read_text())


def test_a_name_that_is_none_is_refused() -> None:
    failed = run("new-key", "two words")
    assert failed.exit_code == 2
    assert "a key's name has 1 to 64 letters" in failed.output


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read: No such file or directory; expected a file of keys"),
        ("a c2hvcnQ=\n", "line 1: key 'a' has 5 bytes; expected NAME BASE64"),
        ("", "there is no key in it"),
    ],
)
def test_a_file_that_cannot_be_used_is_said_before_a_catalog_is_made(
    keys_file: Path, text: str | None, said: str
) -> None:
    if text is not None:
        keys_file.write_text(text)
    with pytest.raises(CannotServe, match="KVRECALL_ENCRYPTION__KEYS_FILE") as refusal:
        asyncio.run(open_catalog(Settings()))
    assert said in str(refusal.value)
    assert not (keys_file.parent / "data").exists()


async def _add_session() -> None:
    catalog = await open_catalog(Settings())
    settings = SessionSettings(budget=64, repair_rows=8, method="snapkv", tenant="ann")
    session = Session("s", 1, settings, 1.0, 1.0, 0, MemoryReport(budget=64))
    await catalog.sessions.create(session, b"", None)
    await catalog.close()


async def _get_ids() -> list[str]:
    catalog = await open_catalog(Settings())
    ids = await catalog.sessions.get_ids()
    await catalog.close()
    return ids


def test_a_tenant_is_shredded_once_somebody_said_yes(keys_file: Path) -> None:
    keys_file.write_text(run("new-key", "2026-11").output)
    asyncio.run(_add_session())
    assert run("shred", "--tenant", "ann", input="n\n").exit_code == 1
    assert asyncio.run(_get_ids()) == ["s"]
    shredded = run("shred", "--tenant", "ann", "--yes")
    assert shredded.exit_code == 0
    assert "deleted 1 session of the tenant; its data key is gone" in shredded.output
    assert asyncio.run(_get_ids()) == []
    again = run("shred", "--tenant", "ann", input="y\n")
    assert "deleted 0 sessions of the tenant; it had no data key" in again.output


def test_without_keys_or_a_catalog_nothing_is_shredded(
    keys_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys_file.write_text(run("new-key", "2026-11").output)
    failed = run("shred", "--tenant", "ann", "--yes")
    assert failed.exit_code == 2
    assert "there is no catalog in" in failed.output
    monkeypatch.delenv("KVRECALL_ENCRYPTION__KEYS_FILE")
    failed = run("shred", "--tenant", "ann", "--yes")
    assert failed.exit_code == 2
    assert "nothing is encrypted here" in failed.output


def test_a_catalog_with_other_keys_is_refused_by_the_name_of_its_own(keys_file: Path) -> None:
    keys_file.write_text(run("new-key", "old").output)
    asyncio.run(_add_session())
    keys_file.write_text(run("new-key", "new").output)
    with pytest.raises(CannotServe, match="wrapped by the key 'old', which is not given"):
        asyncio.run(_get_ids())
