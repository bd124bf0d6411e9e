"""Extras: each command names the one it needs, and the gateway's brings no torch."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import pytest

from kvrecall_server.cli.commands import app
from kvrecall_server.cli.extras import (
    EXTRA_BY_COMMAND,
    MODULES,
    SHARED,
    WORKER,
    MissingLibraries,
    require_extra,
)

ROOT = Path(__file__).parents[3]
# A start of the interpreter and the import of a command's libraries, on a machine under load.
SECONDS = 300


def run_without(modules: tuple[str, ...], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `kvrecall` in a process in which `modules` cannot be imported."""
    program = (
        "import sys; hidden, sys.argv[1:] = sys.argv[1].split(), sys.argv[2:]; "
        "sys.modules.update(dict.fromkeys(hidden)); "
        "from kvrecall_server.cli.__main__ import main; main()"
    )
    command = [sys.executable, "-c", program, " ".join(modules), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)


def read_project(file: str) -> dict[str, Any]:
    """The table `project` of one of the two distributions."""
    return cast("dict[str, Any]", tomllib.loads((ROOT / file).read_text("utf-8"))["project"])


def required(extra: str) -> set[str]:
    """Distributions that an extra of pyproject.toml names, also through other extras."""
    names: set[str] = set()
    requirements = read_project("pyproject.toml")["optional-dependencies"][extra]
    for requirement in [*read_project("kvrecall/pyproject.toml")["dependencies"], *requirements]:
        if nested := re.fullmatch(r"kvrecall-server\[(.+)\]", requirement):
            names = names.union(*(required(each) for each in nested[1].split(",")))
        else:
            names.add(re.split(r"[\[<>=]", requirement)[0])
    return names


def top_level_modules(name: str) -> set[str]:
    """Importable names of an installed distribution."""
    files = distribution(name).files or ()
    return {path.parts[0].removesuffix(".py") for path in files if path.suffix in (".py", ".so")}


def closure(names: set[str]) -> set[str]:
    """Distributions and everything that they require without an extra, by installed metadata."""
    found: set[str] = set()
    waiting = set(names)
    while waiting:
        name = waiting.pop()
        found.add(name)
        for requirement in distribution(name).requires or ():
            if ";" not in requirement:
                waiting.add(re.split(r"[\[<>=!~ (]", requirement)[0].lower())
        waiting -= found
    return found


def test_the_client_needs_httpx_alone_and_the_server_the_client_of_its_version() -> None:
    client, server = read_project("kvrecall/pyproject.toml"), read_project("pyproject.toml")
    assert [re.split(r"[<>=]", each)[0] for each in client["dependencies"]] == ["httpx"]
    assert server["dependencies"] == [f"{client['name']}=={server['version']}"]
    assert client["version"] == server["version"]


def test_the_gateway_extra_brings_no_torch() -> None:
    heavy = {"torch", "transformers", "sentence-transformers", "safetensors", "matplotlib"}
    assert not closure(required("gateway")) & heavy
    assert heavy - {"matplotlib"} <= required("worker")
    assert heavy <= required("demo")


def test_all_is_the_gateway_and_the_worker() -> None:
    assert required("all") == required("gateway") | required("worker")


@pytest.mark.parametrize("extra", MODULES)
def test_the_modules_of_an_extra_are_those_that_pyproject_installs(extra: str) -> None:
    for name in required(extra):
        modules = {each.split(".")[0] for each in MODULES[extra]}
        assert top_level_modules(name) & modules, f"{name} is not in MODULES[{extra!r}]"
    assert all(find_spec(each) for each in MODULES[extra])


def test_every_command_has_an_extra() -> None:
    commands = {each.name for each in app.registered_commands}
    names = commands | {str(each.name) for each in app.registered_groups}
    assert names <= set(EXTRA_BY_COMMAND)
    assert set(EXTRA_BY_COMMAND.values()) - {None} <= set(MODULES)


@pytest.mark.parametrize("command", EXTRA_BY_COMMAND)
def test_with_everything_installed_each_command_has_its_libraries(command: str) -> None:
    require_extra(command)


def test_a_command_names_the_extra_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cast("dict[str, Any]", sys.modules), "torch", None)
    with pytest.raises(MissingLibraries, match=r"^kvrecall serve needs: pip install '.\[all\]'"):
        require_extra("serve")
    require_extra("gateway")


def test_with_the_client_alone_the_command_says_what_to_install() -> None:
    hidden = tuple(name for name in SHARED if name not in ("httpx", "google.protobuf"))
    for arguments in ([], ["--help"], ["gateway", "--help"], ["serve"]):
        ended = run_without(hidden, *arguments)
        assert ended.returncode == 2
        assert "pip install '.[" in ended.stderr
        assert "Traceback" not in ended.stderr


def test_without_the_workers_libraries_the_gateway_runs_and_serve_says_what_it_needs() -> None:
    hidden = (*(name for name in WORKER if name not in SHARED), "matplotlib")
    shown = run_without(hidden, "gateway", "--help")
    assert (shown.returncode, shown.stderr) == (0, "")
    ended = run_without(hidden, "serve", "--port", "0")
    assert ended.returncode == 2
    assert ended.stderr.startswith("kvrecall serve needs: pip install '.[all]'")
    assert "torch" in ended.stderr


def test_without_the_gateways_libraries_a_worker_is_built(tmp_path: Path) -> None:
    hidden = "fastapi uvicorn matplotlib"
    program = (
        "import sys; sys.modules.update(dict.fromkeys(sys.argv[1].split())); "
        "import kvrecall_server.cli.worker, kvrecall_server.app.wiring, workers.rpc.server, "
        "workers.rpc.registration, kvrecall_server.app.redis"
    )
    command = [sys.executable, "-c", program, hidden]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
