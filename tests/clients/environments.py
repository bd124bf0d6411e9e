"""Environments of clients and agents: one for each, kept between runs, made anew when its packages change."""

import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SCRIPTS = HERE / "scripts"
_INSTALL_SECONDS = 900


@dataclass(frozen=True)
class Client:
    """A client: its script, and the packages of its environment.

    `reference`: it adds no prompts of its own, so the reference model understands it.
    """

    name: str
    script: str
    packages: tuple[str, ...]
    reference: bool = False

    @property
    def is_node(self) -> bool:
        """True for a client of Node's."""
        return self.script.endswith(".mjs")


@dataclass(frozen=True)
class Agent:
    """A coding agent: its packages, all that is set in it, and its command lines.

    `settings`, in agents/, becomes the file `settings_at` below HOME; without such a place the shell
    reads it before each command, or runs it once. `quiet`: variables that stop reports to elsewhere. `lacks`: the
    scenarios for which it has no mode, each with the reason. Command lines have places for `prompt`
    and `id`.
    """

    name: str
    key: str
    packages: tuple[str, ...]
    settings: str
    ask: tuple[str, ...]
    go_on: tuple[str, ...] = ()
    resume: tuple[str, ...] = ()
    id: str = ""
    id_from: tuple[str, ...] = ()
    settings_at: str = ""
    settings_once: bool = False
    quiet: Mapping[str, str] = field(default_factory=dict)
    lacks: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_node(self) -> bool:
        """True for an agent of Node's, False for one of Python's."""
        return "==" not in self.packages[0]


def get_version(packages: Sequence[str]) -> str:
    """Return the version of the first package."""
    return packages[0].replace("==", "@").rpartition("@")[2]


def read_clients() -> list[Client]:
    """Read clients.toml."""
    return [
        Client(**{name: _freeze(value) for name, value in each.items()})
        for each in _read_file("clients.toml")["client"]
    ]


def read_agents() -> list[Agent]:
    """Read the agents of agents.toml."""
    return [
        Agent(**{name: _freeze(value) for name, value in each.items()})
        for each in _read_file("agents.toml")["agent"]
    ]


def prepare(client: Client, folder: Path) -> list[str]:
    """Make the client's environment in its folder unless it is there; return the script's command.

    Raises CalledProcessError when it cannot be installed.
    """
    name = Path(client.script).stem
    home = _install(name, client.packages, folder, is_node=client.is_node)
    if not client.is_node:
        return [str(home / "bin" / "python"), str(SCRIPTS / client.script)]
    for module in SCRIPTS.glob("*.mjs"):  # Node looks for packages beside the script
        shutil.copy(module, home)
    return ["node", str(home / client.script)]


def prepare_agent(agent: Agent, folder: Path) -> list[Path]:
    """Make the agent's environment unless it is there; return the folders of its commands.

    Raises CalledProcessError when it cannot be installed.
    """
    if not agent.is_node:
        return [_install(agent.key, agent.packages, folder, is_node=False) / "bin"]
    node = _install("node", (_read_file("agents.toml")["node"],), folder, is_node=True)
    runtime = node / "node_modules" / "node" / "bin"
    home = _install(agent.key, agent.packages, folder, is_node=True, path=str(runtime))
    return [home / "node_modules" / ".bin", runtime]


def _install(
    name: str, packages: Sequence[str], folder: Path, *, is_node: bool, path: str = ""
) -> Path:
    """Install packages into a folder of their own, unless they are there; `path` goes before PATH."""
    wanted = hashlib.sha256("\n".join(packages).encode()).hexdigest()[:16]
    home = folder / f"{name}-{wanted}"
    if (home / "installed").exists():
        return home
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    environment = {**os.environ, "PATH": os.pathsep.join(filter(None, (path, os.environ["PATH"])))}
    pip = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    commands = (
        [["npm", "install", "--silent", "--no-fund", "--no-audit", *packages]]
        if is_node
        else [[sys.executable, "-m", "venv", str(home)], [*pip, *packages]]
    )
    for command in commands:
        subprocess.run(command, cwd=home, check=True, timeout=_INSTALL_SECONDS, env=environment)
    (home / "installed").touch()
    return home


def _read_file(name: str) -> dict[str, Any]:
    return tomllib.loads((HERE / name).read_text(encoding="utf-8"))


def _freeze(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
