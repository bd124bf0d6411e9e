"""`kvrecall upgrade`: it says what it found and did, and refuses what it cannot upgrade."""

import fcntl
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import typer
from redis import Redis
from typer.testing import CliRunner

from kvrecall.app.errors import CannotServe
from kvrecall.cli.upgrade import upgrade_command
from services.catalog.redis.migrations.versions import SCHEMA_VERSION as REDIS_VERSION
from services.catalog.sqlite.schema import SCHEMA_VERSION

Upgrade = Callable[..., str]


@pytest.fixture
def upgrade() -> Upgrade:
    """upgrade(*arguments): the output of the command. Raises what it raises."""
    app = typer.Typer()
    app.command()(upgrade_command)

    def run(*arguments: str | Path) -> str:
        result = CliRunner().invoke(app, list(map(str, arguments)))
        if isinstance(result.exception, CannotServe):
            raise result.exception
        assert result.exit_code == 0, result.output
        return str(result.output).strip()

    return run


@pytest.fixture
def data(old_release: Any, tmp_path: Path) -> Path:
    """A data directory of kvrecall 0.1.0."""
    path: Path = old_release.unpack_data(tmp_path)
    return path


def test_an_older_catalog_file_is_upgraded_and_the_copy_named(upgrade: Upgrade, data: Path) -> None:
    catalog = data / "catalog.sqlite3"
    assert upgrade("--data", data) == (
        f"{catalog}: upgraded from version 5 to {SCHEMA_VERSION}; 5 sessions; "
        f"a copy from before is {catalog}.v5-backup"
    )


def test_a_current_catalog_file_is_left_alone(upgrade: Upgrade, data: Path) -> None:
    upgrade("--data", data)
    content = (data / "catalog.sqlite3").read_bytes()
    assert upgrade("--data", data) == (
        f"{data / 'catalog.sqlite3'}: version {SCHEMA_VERSION} already, nothing to do; 5 sessions"
    )
    assert (data / "catalog.sqlite3").read_bytes() == content


def test_a_newer_catalog_file_is_refused_with_what_to_do(upgrade: Upgrade, data: Path) -> None:
    with closing(sqlite3.connect(data / "catalog.sqlite3")) as file:
        file.execute("PRAGMA user_version = 99")
    with pytest.raises(CannotServe, match=r"version 99; .* Run the kvrecall that wrote it"):
        upgrade("--data", data)


def test_a_directory_without_a_catalog_is_refused_and_stays_empty(
    upgrade: Upgrade, tmp_path: Path
) -> None:
    with pytest.raises(CannotServe, match="holds no catalog; name a data directory"):
        upgrade("--data", tmp_path / "empty")
    assert not (tmp_path / "empty").exists()


def test_a_directory_in_use_is_refused_and_left_alone(upgrade: Upgrade, data: Path) -> None:
    with (data / "pages" / "lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(CannotServe, match="in use by another kvrecall; stop that one first"):
            upgrade("--data", data)
    with closing(sqlite3.connect(data / "catalog.sqlite3")) as file:
        assert file.execute("PRAGMA user_version").fetchone() == (5,)


def test_an_older_catalog_in_redis_is_upgraded_once(
    upgrade: Upgrade, old_release: Any, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    namespace = uuid4().hex
    with Redis.from_url(redis_url) as client:
        old_release.load_redis(client, namespace)
    monkeypatch.setenv("KVRECALL_STORE__REDIS_NAMESPACE", namespace)
    location = f"the namespace '{namespace}:catalog' in Redis"
    assert upgrade("--catalog-url", redis_url) == (
        f"{location}: upgraded from version 1 to {REDIS_VERSION}; 3 sessions"
    )
    assert upgrade("--catalog-url", redis_url) == (
        f"{location}: version {REDIS_VERSION} already, nothing to do; 3 sessions"
    )


def test_the_environment_names_the_catalog_too(
    upgrade: Upgrade, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVRECALL_CATALOG_URL", redis_url)
    monkeypatch.setenv("KVRECALL_STORE__REDIS_NAMESPACE", uuid4().hex)
    assert upgrade().endswith("nothing to do; 0 sessions")
