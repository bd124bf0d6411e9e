"""The two distributions as wheels, each in its own environment, beside an application that has our folders' names."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from zipfile import ZipFile

import pytest

from kvrecall_server.app.local.server import wait_for_address
from workers.native.library import find_files

ROOT = Path(__file__).parents[2]
SECONDS = 300
MOST_CLIENT_BYTES = 400_000
# Names of folders that an application may well have.
OURS = ("gateway", "services", "workers", "evals", "reference")
APPLICATION = """
import sys

from kvrecall import KvrecallClient
from kvrecall.client import Message
from services.greeting import HELLO

with KvrecallClient(sys.argv[1]) as client, client.session() as session:
    print(session.say(Message.user(HELLO), max_tokens=4).finish_reason)
"""


def run(*command: object, cwd: Path) -> str:
    """Run a command and return its output."""
    words = list(map(str, command))
    ended = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=SECONDS)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Wheels of the client and of the server, built from a copy without earlier builds."""
    copy = tmp_path_factory.mktemp("source")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    found = project["tool"]["setuptools"]["packages"]["find"]["include"]
    for name in ("kvrecall", *(pattern.removesuffix("*") for pattern in found)):
        kept_out = ("__pycache__", "*.egg-info", "*.so", "build", "results", "runs")
        unwanted = shutil.ignore_patterns(*kept_out)
        shutil.copytree(ROOT / name, copy / name, ignore=unwanted, symlinks=False)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    built = copy / "wheels"
    for source in (copy / "kvrecall", copy):
        options = ["--quiet", "--no-deps", "--no-build-isolation", "-w", built]
        run(sys.executable, "-m", "pip", "wheel", *options, source, cwd=copy)
    (client,), (server,) = built.glob("kvrecall-*.whl"), built.glob("kvrecall_server-*.whl")
    return client, server


def create_environment(folder: Path, *wheels: Path) -> Path:
    """Make an environment with wheels of ours, which has their requirements from this one; return its Python."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=ROOT)
    python = folder / "bin" / "python"
    (packages,) = folder.glob("lib/python*/site-packages")
    # A folder that a .pth file adds gives its libraries, and not the checkout that its own .pth files name.
    (packages / "requirements.pth").write_text(sysconfig.get_paths()["purelib"], "utf-8")
    options = ["--quiet", "--no-deps", "--no-index", "--force-reinstall"]
    run(sys.executable, "-m", "pip", "--python", python, "install", *options, *wheels, cwd=ROOT)
    return python


@pytest.fixture
def application(tmp_path: Path) -> Path:
    """Folder of an application with packages of our names."""
    folder = tmp_path / "application"
    for name in OURS:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").touch()
    (folder / "services" / "greeting.py").write_text('HELLO = "Hello."\n', "utf-8")
    (folder / "app.py").write_text(APPLICATION, "utf-8")
    return folder


def without_path() -> dict[str, str]:
    """This environment's variables, without folders that Python would import from."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@contextmanager
def serving(python: Path, folder: Path, log: Path) -> Iterator[str]:
    """Address of an environment's `kvrecall serve`, started in a folder."""
    options = [
        "--model",
        "reference",
        "--port",
        "0",
        "--data",
        str(folder / "data"),
        "--until-input-ends",
    ]
    pipe = subprocess.PIPE
    with log.open("ab") as errors:
        process = subprocess.Popen(
            [str(python.parent / "kvrecall"), "serve", *options],
            stdin=pipe,
            stdout=pipe,
            stderr=errors,
            cwd=folder,
            env=without_path(),
        )
    with process:
        yield wait_for_address(process, log)
        process.terminate()


def test_the_client_is_one_small_package(wheels: tuple[Path, Path]) -> None:
    client, _ = wheels
    names = ZipFile(client).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"kvrecall"}
    assert client.stat().st_size < MOST_CLIENT_BYTES
    held = {str(path.relative_to(ROOT)) for path in (ROOT / "kvrecall").rglob("*.py*")}
    assert {name for name in held if name.endswith((".py", ".pyi"))} <= set(names)
    assert "kvrecall/py.typed" in names


def test_the_server_has_nothing_of_the_client(wheels: tuple[Path, Path]) -> None:
    _, server = wheels
    files = [{n for n in ZipFile(each).namelist() if ".dist-info/" not in n} for each in wheels]
    assert not files[0] & files[1]
    (entries,) = (n for n in ZipFile(server).namelist() if n.endswith("entry_points.txt"))
    assert b"kvrecall = kvrecall_server.cli" in ZipFile(server).read(entries)


def test_the_server_has_native_code_that_its_wheel_was_compiled_for(
    wheels: tuple[Path, Path],
) -> None:
    client, server = wheels
    names = {Path(name).name.partition(".")[0] for name in ZipFile(server).namelist()}
    assert "attend_baseline" in names
    assert "none-any" not in server.name
    assert client.name.endswith("py3-none-any.whl")


def test_a_wheel_is_built_without_a_compiler_too(tmp_path: Path) -> None:
    options = ["--build-lib", tmp_path, "--build-temp", tmp_path / "objects"]
    command = [sys.executable, "setup.py", "--quiet", "build_ext", *options]
    without = {"CC": "/no/compiler", "CXX": "/no/compiler"}
    ended = subprocess.run(
        list(map(str, command)),
        cwd=ROOT,
        env={**os.environ, **without},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert ended.returncode == 0, ended.stderr
    assert "/no/compiler" in ended.stderr
    assert find_files(tmp_path / "workers" / "native") == {}


def test_an_application_with_folders_of_our_names_is_served_by_both(
    wheels: tuple[Path, Path], application: Path, tmp_path: Path
) -> None:
    client, _ = wheels
    users = create_environment(tmp_path / "client", client)
    server = create_environment(tmp_path / "server", *wheels)
    with serving(server, application, tmp_path / "log") as url:
        assert run(users, "app.py", url, cwd=application) in ("length\n", "stop\n")


def test_a_foreign_folder_on_the_path_is_named(
    wheels: tuple[Path, Path], application: Path, tmp_path: Path
) -> None:
    server = create_environment(tmp_path / "server", *wheels)
    ended = subprocess.run(
        [server, "-m", "kvrecall_server.cli", "serve"],
        cwd=application,
        env=without_path(),
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert ended.returncode == 2
    assert "kvrecall needs its own package" in ended.stderr
    assert str(application) in ended.stderr
    assert "Traceback" not in ended.stderr
