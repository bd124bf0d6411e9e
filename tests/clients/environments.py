"""Environments of clients: one per client, kept between runs, made anew when its packages change."""

import hashlib
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

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

    @property
    def version(self) -> str:
        """The version of the first package."""
        return self.packages[0].replace("==", "@").rpartition("@")[2]


def read_clients() -> list[Client]:
    """Read clients.toml."""
    listed = tomllib.loads((HERE / "clients.toml").read_text(encoding="utf-8"))["client"]
    return [Client(**{**each, "packages": tuple(each["packages"])}) for each in listed]


def prepare(client: Client, folder: Path) -> list[str]:
    """Make the client's environment in its folder unless it is there; return the script's command.

    Raises CalledProcessError when it cannot be installed.
    """
    wanted = hashlib.sha256("\n".join(client.packages).encode()).hexdigest()[:16]
    home = folder / f"{Path(client.script).stem}-{wanted}"
    if not (home / "installed").exists():
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        for command in _get_installation(client, home):
            subprocess.run(command, cwd=home, check=True, timeout=_INSTALL_SECONDS)
        (home / "installed").touch()
    if not client.is_node:
        return [str(home / "bin" / "python"), str(SCRIPTS / client.script)]
    for module in SCRIPTS.glob("*.mjs"):  # Node looks for packages beside the script
        shutil.copy(module, home)
    return ["node", str(home / client.script)]


def _get_installation(client: Client, home: Path) -> list[list[str]]:
    if client.is_node:
        return [["npm", "install", "--silent", "--no-fund", "--no-audit", *client.packages]]
    pip = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    return [[sys.executable, "-m", "venv", str(home)], [*pip, *client.packages]]
