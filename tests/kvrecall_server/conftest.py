"""The command line, and one real server that the tests share."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvrecall.client import KvrecallClient
from kvrecall_server.app.local.server import ServerNeeds, server_at
from kvrecall_server.cli.commands import app

# Largest budget, and so size of a full cache, in the tests' server, in rows.
SERVER_ROWS = 768


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Run `kvrecall` with arguments and typed lines, in a terminal wide enough for every line."""
    monkeypatch.setenv("COLUMNS", "160")
    runner = CliRunner()

    def run(*arguments: str | Path, typed: str = "") -> Any:
        return runner.invoke(app, [str(argument) for argument in arguments], input=typed)

    return run


@pytest.fixture(scope="session")
def server_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data directory of the tests' server."""
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="session")
def server(server_data: Path) -> Iterator[str]:
    """The address of a real server process with the packaged model."""
    with server_at(None, ServerNeeds(slots=2, max_budget=SERVER_ROWS, data=server_data)) as url:
        yield url


@pytest.fixture
def client(server: str) -> Iterator[KvrecallClient]:
    """A client of the tests' server."""
    with KvrecallClient(server) as connected:
        yield connected


@pytest.fixture
def json_lines(tmp_path: Path) -> Callable[..., Path]:
    """Write objects as JSON lines; returns the file's path."""

    def write(*objects: Any) -> Path:
        path = tmp_path / "recorded.jsonl"
        path.write_text("".join(json.dumps(each) + "\n" for each in objects), encoding="utf-8")
        return path

    return write
