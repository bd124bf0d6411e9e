"""`kvrecall keys`: a key is shown once, listed without its secret, and revoked by its id."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvrecall.domain.errors import Unauthenticated
from kvrecall_server.app.access import build_access
from kvrecall_server.app.catalog import get_path, open_catalog
from kvrecall_server.app.errors import CannotServe
from kvrecall_server.app.settings import Settings
from kvrecall_server.cli.commands import app
from services.access.principals import Credentials, Principal, Scope

KEY = re.compile(r"kvr-[a-z0-9]{8}[A-Za-z0-9_-]{43}")


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVRECALL_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path / "data"


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["keys", *words])


async def authenticate(key: str) -> Principal:
    """The principal of a key, according to a gateway off loopback over the same data."""
    settings = Settings(host="0.0.0.0")
    catalog = await open_catalog(settings)
    try:
        access = build_access(settings, catalog)
        found = (await access.admit(Credentials(key, None, ""), [*Scope])).principal
        await access.stop()
        return found
    finally:
        await catalog.close()


def test_a_key_is_shown_once_and_admits_its_tenant(data: Path) -> None:
    made = run("create", "--tenant", "ann", "--name", "laptop", "--scope", "infer")
    assert made.exit_code == 0, made.output
    key = made.stdout.strip()
    assert KEY.fullmatch(key)
    found = asyncio.run(authenticate(key))
    assert found == Principal("ann", frozenset({Scope.INFER}), key[4:12])
    listed = run("list").stdout
    for word in (key[4:12], "ann", "laptop", "infer", "valid"):
        assert word in listed
    assert key[12:] not in listed
    stored = b"".join(path.read_bytes() for path in data.iterdir() if path.is_file())
    assert key[12:].encode() not in stored
    assert (data / "key-pepper").stat().st_mode & 0o777 == 0o600


def test_a_revoked_key_is_refused_and_stays_listed(data: Path) -> None:
    key, other = run("create").stdout.strip(), run("create").stdout.strip()
    revoked = run("revoke", key[4:12])
    assert revoked.exit_code == 0
    assert "10 seconds" in revoked.stdout
    with pytest.raises(Unauthenticated):
        asyncio.run(authenticate(key))
    assert asyncio.run(authenticate(other)).tenant == ""
    lines = [line for line in run("list").stdout.splitlines() if key[4:12] in line]
    assert "revoked" in lines[0]
    assert run("revoke", "00000000").exit_code == 2


@pytest.mark.parametrize("words", [("--tenant", "a b"), ("--expires", "0d"), ("--expires", "1y")])
def test_a_wrong_option_makes_no_key(data: Path, words: tuple[str, str]) -> None:
    assert run("create", *words).exit_code == 2
    assert not get_path(Settings()).exists()


def test_a_key_may_expire(data: Path) -> None:
    key = run("create", "--expires", "90d").stdout.strip()
    assert asyncio.run(authenticate(key))
    assert "valid" in run("list").stdout


def test_keys_are_made_while_a_gateway_uses_the_catalog(data: Path) -> None:
    async def make_beside() -> Any:
        catalog = await open_catalog(Settings())
        try:
            made = await asyncio.to_thread(run, "create", "--tenant", "ann")
            assert made.exit_code == 0, made.output
            return await catalog.api_keys.get(made.stdout.strip()[4:12])
        finally:
            await catalog.close()

    assert asyncio.run(make_beside()).tenant == "ann"


def test_gateways_that_share_a_catalog_need_a_common_pepper(
    data: Path, monkeypatch: pytest.MonkeyPatch, redis_url: str, tmp_path: Path
) -> None:
    monkeypatch.setenv("KVRECALL_CATALOG_URL", redis_url)
    monkeypatch.setenv("KVRECALL_STORE__REDIS_NAMESPACE", tmp_path.name)
    refused = run("create")
    assert refused.exit_code == 2
    assert "KVRECALL_ACCESS__PEPPER_FILE" in refused.stderr
    pepper = tmp_path / "pepper"
    monkeypatch.setenv("KVRECALL_ACCESS__PEPPER_FILE", str(pepper))
    assert "cannot be read" in run("create").stderr
    pepper.write_text("short\n")
    assert "shorter than 16 bytes" in run("create").stderr
    pepper.write_text("0123456789abcdef0123\n")
    key = run("create", "--tenant", "ann").stdout.strip()
    assert asyncio.run(authenticate(key)).tenant == "ann"


def test_a_gateway_is_refused_off_loopback_until_there_is_a_key(data: Path) -> None:
    refused = CliRunner().invoke(app, ["gateway", "--host", "0.0.0.0", "--port", "0"])
    assert refused.exit_code == 2
    assert "kvrecall keys create" in refused.stderr
    assert isinstance(refused.exception, SystemExit)
    assert CannotServe.exit_code == 2
