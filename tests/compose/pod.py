"""A pod's containers on a Docker daemon, asked as the kubelet asks them."""

import json
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import httpx

from tests.compose.docker import Docker, DockerFailed
from tests.conftest import until
from tests.operations.charts import Object

# Of a busy machine; the chart's own are shorter.
ANSWER_SECONDS = 60.0
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


@dataclass(frozen=True)
class Pod:
    """Containers with one network, of a pod's `spec`; `ids`: Docker's by their names."""

    docker: Docker
    name: str
    spec: Object
    ids: Mapping[str, str]

    def get_address(self, port: str) -> str:
        """Where a port, by its name, is reached from here: host and number."""
        first = self.spec["containers"][0]["name"]
        (number,) = [each["containerPort"] for each in get_ports(self.spec) if each["name"] == port]
        return self.docker("port", self.ids[first], f"{number}/tcp").split()[0]

    def wait(self) -> None:
        """Wait for every probe, as long as the kubelet would wait for the start. Raises AssertionError."""
        for container in self.spec["containers"]:
            for kind in PROBES:
                if (probe := container.get(kind)) is not None:
                    limit = probe.get("failureThreshold", 3) * probe.get("periodSeconds", 10)
                    until(
                        partial(self.answers, container["name"], probe),
                        f"{kind} of {self.name}'s {container['name']}",
                        max(limit, ANSWER_SECONDS),
                    )

    def answers(self, container: str, probe: Object) -> bool:
        """Whether a container's probe is answered now. Raises AssertionError if the container has ended."""
        assert self._is_running(container), f"{container} has ended: {self.logs()}"
        if "exec" in probe:
            return self.docker.succeeds("exec", self.ids[container], *probe["exec"]["command"])
        kind = "httpGet" if "httpGet" in probe else "tcpSocket"
        address = self.get_address(probe[kind]["port"])
        if kind == "tcpSocket":
            return _accepts(address)
        try:
            url = f"http://{address}{probe[kind]['path']}"
            return httpx.get(url, timeout=ANSWER_SECONDS).is_success
        except httpx.HTTPError:
            return False

    def run(self, container: str, *command: str) -> str:
        """Return what a command writes to standard output in a container. Raises DockerFailed."""
        return self.docker("exec", self.ids[container], *command).strip()

    def kill(self) -> None:
        """Kill all containers and remove them, as when a node is lost. Volumes stay."""
        self.docker("rm", "--force", *self.ids.values())

    def end(self) -> dict[str, int]:
        """End it as the kubelet does: hooks, then SIGTERM and the grace. Returns the containers' exit statuses."""
        for container in self.spec["containers"]:
            if hook := container.get("lifecycle", {}).get("preStop"):
                self.run(container["name"], *hook["exec"]["command"])
        grace = self.spec["terminationGracePeriodSeconds"]
        self.docker("stop", f"--timeout={grace}", *reversed(list(self.ids.values())))
        return {name: self._inspect(each)["ExitCode"] for name, each in self.ids.items()}

    def logs(self) -> str:
        """The last lines of all containers."""
        return "".join(self._read_logs())

    def _read_logs(self) -> Iterator[str]:
        for container, each in self.ids.items():
            try:
                lines = self.docker.run("sh", "-c", f"docker logs --tail=40 {each} 2>&1")
            except DockerFailed as error:
                lines = str(error)
            yield f"{self.name}, {container}:\n{lines}\n"

    def _is_running(self, container: str) -> bool:
        running: bool = self._inspect(self.ids[container])["Running"]
        return running

    def _inspect(self, container: str) -> Object:
        state: Object = json.loads(self.docker("inspect", container))[0]["State"]
        return state


def get_ports(spec: Object) -> list[Object]:
    """The ports of a pod's containers."""
    return [port for container in spec["containers"] for port in container.get("ports", ())]


def _accepts(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), ANSWER_SECONDS):
            return True
    except OSError:
        return False
