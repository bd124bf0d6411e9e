"""`kvrecall doctor`: what is wrong, and what to do about it."""

import json
import socket
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from kvrecall_server.app.settings import Settings
from kvrecall_server.app.start import diagnosis
from kvrecall_server.app.start.diagnosis import Check


@pytest.fixture
def free_port() -> int:
    """A port that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def run(command: Callable[..., Any], *arguments: Any) -> tuple[int, dict[str, dict[str, str]]]:
    found = command("doctor", "--json", *arguments)
    return found.exit_code, {each["name"]: each for each in json.loads(found.output)}


def test_what_is_installed_and_free_is_fine(
    command: Callable[..., Any], tmp_path: Path, free_port: int
) -> None:
    _, checks = run(command, "--data", tmp_path, "--port", free_port)
    for name in ("Python", "kvrecall", "torch", "budget", "memory", "data directory", "port"):
        assert checks[name]["result"] == "ok", checks[name]
    assert "slots" in checks["memory"]["found"]


def test_native_code_that_was_not_built_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "find_files", dict)
    check = diagnosis.check_native()
    assert (check.name, check.result) == ("native attention", "note")
    assert "g++" in check.advice
    monkeypatch.setattr(diagnosis, "find_files", lambda: {"baseline": Path(), "avx2": Path()})
    assert diagnosis.check_native() == Check("native attention", "ok", "built for baseline, avx2")


def test_everything_that_is_wrong_is_found_at_once(
    command: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVRECALL_CATALOG_URL", "redis://127.0.0.1:1/0")
    monkeypatch.setenv("KVRECALL_MODEL", "reference")
    (tmp_path / "file").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        taken.settimeout(0.01)
        port = taken.getsockname()[1]
        monkeypatch.setattr(diagnosis, "KvrecallClient", SilentClient)
        code, checks = run(
            command,
            "--budget",
            4,
            "--slots",
            99_999_999,
            "--data",
            tmp_path / "file",
            "--port",
            port,
        )
    assert code == 1
    wrong = {name for name, check in checks.items() if check["result"] == "wrong"}
    assert {"budget", "memory", "server", "Redis of the catalog"} <= wrong
    assert checks["data directory"]["result"] == "note"
    assert all(checks[name]["advice"] or "redis" in checks[name]["found"] for name in wrong)


class SilentClient:
    """A client of a port that answers nothing."""

    def __init__(self, url: str) -> None:
        pass

    def __enter__(self) -> "SilentClient":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def ready(self) -> bool:
        return False


def test_a_running_server_is_asked(command: Callable[..., Any], server: str) -> None:
    _, checks = run(command, "--port", server.rpartition(":")[2])
    assert checks["server"]["result"] == "ok"


def test_a_missing_package_and_an_old_one_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"kvrecall": "0.2.0", "torch": "2.8.1+cpu"}

    def get_version(name: str) -> str:
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(diagnosis, "version", get_version)
    checks = {each.name: each for each in diagnosis.check_packages()}
    assert checks["torch"].result == "wrong"
    assert "'torch>=2.9'" in checks["torch"].advice
    assert checks["fastapi"].result == "note"
    assert "[gateway]" in checks["fastapi"].advice


def test_threads_that_are_not_the_cores_are_noted() -> None:
    assert diagnosis.check_threads({"OMP_NUM_THREADS": "999"}).result == "note"
    assert diagnosis.check_threads({}).result == "ok"


def test_an_unknown_model_is_wrong() -> None:
    check = diagnosis.check_model_name(Settings(model="smollm3"))
    assert isinstance(check, Check)
    assert (check.result, "did you mean smollm2?" in check.advice) == ("wrong", True)
