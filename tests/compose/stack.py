"""The services of docker-compose.yml in containers, as a project of the tests' own."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from kvrecall.client import KvrecallClient
from tests.compose.docker import Docker
from tests.compose.images import BUILT, Images
from tests.conftest import until
from tests.documented import read_lines
from tests.end_to_end.servers import DEADLINE_SECONDS
from tests.operations.catalogue import ROOT
from tests.operations.compose import BASE

PROJECT = "kvrecall-compose-test"
# A service that ends and is started again, over and over, never becomes healthy.
WAIT = ("--wait", f"--wait-timeout={DEADLINE_SECONDS:.0f}")
# Which Compose gives to what it builds and creates.
LABEL = "com.docker.compose.project"
PROFILES = ("alerting",)
COMPOSE = Path(sys.executable).parent / "docker-compose"
# Ports of the services that the tests ask. Published on free ones, so that no other program is in the way.
PORTS = {"gateway": 8420, "prometheus": 9090, "alertmanager": 9093}


class Override:
    """A YAML file beside the compose file: images, and ports that Compose chooses."""

    def __init__(self, images: Images) -> None:
        self._services = {name: dict(service) for name, service in images.services.items()}
        for name, port in PORTS.items():
            self._services.setdefault(name, {})["ports"] = _Replaced([f"127.0.0.1::{port}"])

    def write(self, file: Path, secrets: Path) -> None:
        """Write it, with the folder of what the script wrote."""
        files = {"kvrecall-api-key": "api-key", "kvrecall-alertmanager": "alertmanager.yml"}
        whole = {
            "services": self._services,
            "secrets": {name: {"file": str(secrets / each)} for name, each in files.items()},
        }
        file.write_text(yaml.dump(whole, Dumper=_Dumper), encoding="utf-8")


class _Replaced(list[str]):
    """A list that replaces the compose file's instead of following it."""


class _Dumper(yaml.SafeDumper):
    """Writes YAML with Compose's own tags."""


def _represent(dumper: yaml.SafeDumper, replaced: _Replaced) -> yaml.Node:
    return dumper.represent_sequence("!override", replaced)


_Dumper.add_representer(_Replaced, _represent)


@dataclass(frozen=True)
class Container:
    """A container as the daemon shows it."""

    id: str
    name: str
    address: str
    pid: int
    restarts: int
    health: str

    @property
    def is_healthy(self) -> bool:
        """True if its health check passes."""
        return self.health == "healthy"


class Stack:
    """Compose's commands on the project, and clients of its services."""

    def __init__(self, docker: Docker, images: Images, folder: Path) -> None:
        self._docker = docker
        self._absent = images.absent
        self._folder = folder
        self._override = Override(images)

    def prepare(self) -> None:
        """Write secrets with the script that operators use, and the override."""
        script = [str(ROOT / "deploy" / "secrets.sh"), str(self._folder)]
        subprocess.run(script, check=True, capture_output=True)
        secrets = self._folder / "deploy" / "secrets"
        self._override.write(self._folder / "override.yml", secrets)
        self.key = (secrets / "api-key").read_text(encoding="utf-8")

    def compose(self, *arguments: str) -> str:
        """Return what `docker-compose ARGUMENTS` writes to standard output. Raises DockerFailed."""
        options = [f"--project-name={PROJECT}", f"--project-directory={ROOT}"]
        options += [f"--file={ROOT / BASE}", f"--file={self._folder / 'override.yml'}"]
        options += [f"--env-file={self._folder / '.env'}"]
        options += [f"--profile={name}" for name in PROFILES]
        return self._docker.run(str(COMPOSE), "--progress=plain", *options, *arguments)

    def run_documented(self, name: str, **variables: str) -> None:
        """Run the lines of docs/how-to/deploy.md under a name on this project. Raises DockerFailed."""
        project = {
            "COMPOSE_PROJECT_NAME": PROJECT,
            "COMPOSE_FILE": os.pathsep.join((str(ROOT / BASE), str(self._folder / "override.yml"))),
            "COMPOSE_ENV_FILES": str(self._folder / ".env"),
            "COMPOSE_PROFILES": ",".join(PROFILES),
            "DOCKER_COMPOSE": str(COMPOSE),
        }
        own = replace(
            self._docker, environment={**self._docker.environment, **project, **variables}
        )
        # Compose is a program of its own here, and no plugin of docker's.
        lines = 'docker() { shift; "$DOCKER_COMPOSE" "$@"; }\n' + read_lines(
            "how-to/deploy.md", name
        )
        own.run("bash", "-euc", f"cd '{ROOT}'\n{lines}")

    def build(self) -> None:
        """Build the images that the compose file builds; those of an earlier run are removed."""
        self.compose("build")
        self._docker("image", "prune", "--force", "--filter", f"label={LABEL}={PROJECT}")

    def up(self) -> None:
        """Start every service that has an image, and wait until they are healthy and a worker has joined."""
        services = self.compose("config", "--services").split()
        self.compose("up", *WAIT, *sorted(set(services) - self._absent))
        with self.connect() as client:
            until(client.ready, "a worker has joined", DEADLINE_SECONDS)

    def down(self) -> None:
        """Remove containers, networks and volumes."""
        self.compose("down", "--volumes", "--remove-orphans", "--timeout=10")

    def scale(self, workers: int) -> None:
        """Run so many workers."""
        scale = f"worker={workers}"
        self.compose("up", "--no-recreate", *WAIT, "--scale", scale, "worker")

    def containers(self, service: str) -> list[Container]:
        """Running containers of a service."""
        ids = self.compose("ps", "--quiet", service).split()
        return [_read(each) for each in json.loads(self._docker("inspect", *ids))] if ids else []

    def run_inside(self, container: Container, script: str) -> str:
        """Return what a shell script writes to standard output in a container. Raises DockerFailed."""
        return self._docker("exec", container.id, "sh", "-c", script).strip()

    def kill(self, container: Container) -> None:
        """Kill it, as `docker kill` does: its restart policy does not bring it back."""
        self._docker("kill", container.id)

    def crash(self, container: Container) -> None:
        """Kill its process behind Docker's back: it died of itself."""
        self._docker(
            *("run", "--rm", "--pid=host", "--user=0", "--entrypoint=python3", f"{BUILT}/worker"),
            *("-c", f"import os; os.kill({container.pid}, 9)"),
        )

    def logs(self) -> str:
        """The last lines of all containers, and their states."""
        return self.compose("ps", "--all") + self.compose("logs", "--tail=40", "--no-color")

    def url(self, service: str) -> str:
        """Where a service answers on this machine."""
        return f"http://{self.compose('port', service, str(PORTS[service])).strip()}"

    def connect(self) -> KvrecallClient:
        """A client of the gateway with the key of the secrets."""
        return KvrecallClient(self.url("gateway"), DEADLINE_SECONDS, api_key=self.key)

    def remains(self) -> list[str]:
        """Containers, volumes and networks of the project."""
        label = f"label={LABEL}={PROJECT}"
        commands: Sequence[Sequence[str]] = (("ps", "--all"), ("volume", "ls"), ("network", "ls"))
        found = [self._docker(*each, "--quiet", "--filter", label) for each in commands]
        return [line for lines in found for line in lines.split()]


def _read(found: dict[str, Any]) -> Container:
    state = found["State"]
    (network,) = found["NetworkSettings"]["Networks"].values()
    return Container(
        id=found["Id"],
        name=found["Name"].removeprefix("/"),
        address=network["IPAddress"],
        pid=state["Pid"],
        restarts=found["RestartCount"],
        health=state.get("Health", {}).get("Status", ""),
    )
