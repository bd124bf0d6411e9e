"""Processes of the end-to-end tests: `kvrecall serve`, or a gateway and two workers on one Redis."""

import os
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from faults.rig.ports import free_port
from faults.rig.processes import QUIET
from faults.rig.zygote import COMMAND_LINE, IMPORTS, ForkedProcess, Zygote
from kvrecall.client import KvrecallClient
from kvrecall_server.app.local.server import ServerNeeds, launch, wait_for_address

# Limit of every wait and request; on a machine that is not overloaded they take seconds.
DEADLINE_SECONDS = 300.0
SLOTS = 2
MAX_BUDGET = 256
BLOCK_TOKENS = 64
RUNNING_TURNS = 8
WAITING_TURNS = 1
# Settings of the shared servers.
SMALL_LIMITS = {
    "KVRECALL_SERVICE__MAX_RUNNING_TURNS": str(RUNNING_TURNS),
    "KVRECALL_SERVICE__MAX_WAITING_TURNS": str(WAITING_TURNS),
    "KVRECALL_SERVICE__QUEUE_SECONDS": str(DEADLINE_SECONDS),
    "KVRECALL_SERVICE__DEFAULT_MAX_TOKENS": "8",
    "KVRECALL_SERVICE__MAX_OUTPUT_TOKENS": "2000",
    "KVRECALL_GATEWAY__MAX_BODY_BYTES": str(2 << 20),
}
# What kvrecall's commands import beside what every zygote has. None of these starts a thread.
COMMANDS = (
    "kvrecall_server.cli.commands",
    "kvrecall_server.app.local.service",
    "kvrecall_server.app.local.worker",
    "kvrecall_server.app.run",
    "gateway.app",
    "transformers.models.llama.modeling_llama",
)

Json = dict[str, Any]


# Servers start in threads. `cache` alone would make a zygote in each of them, and drop all but one: the
# processes of a zygote that was dropped count as ended while they run.
_ZYGOTE_LOCK = threading.Lock()


def shared_zygote() -> Zygote:
    """The process that the servers of this test run are forked from; it ends with the run."""
    with _ZYGOTE_LOCK:
        return _create_zygote()


@cache
def _create_zygote() -> Zygote:
    return Zygote(QUIET, [*IMPORTS, *COMMANDS])


@dataclass
class Process:
    """A serving command of kvrecall, which can be ended and started again: a real process.

    forked: from a process that has its imports, which take longer than most tests.
    """

    command: str
    arguments: list[str]
    log: Path
    environment: Mapping[str, str]
    address: str = ""
    running: "ForkedProcess | subprocess.Popen[bytes] | None" = None
    forked: bool = True

    def start(self) -> None:
        """Start it and wait until it listens."""
        environment = os.environ | QUIET | dict(self.environment)
        arguments = [*self.arguments, "--log", "json"]
        if not self.forked:
            self.running, self.address = launch(
                arguments, self.log, self.command, environment=environment
            )
            return
        command = [self.command, "--until-input-ends", *arguments]
        with self.log.open("ab") as log:
            process = shared_zygote().spawn(COMMAND_LINE, command, environment, log.fileno())
        self.address = wait_for_address(process, self.log)
        self.running = process

    def end(self, number: int) -> int:
        """Send a signal and wait for the end; returns the exit code, 0 if it does not run."""
        if self.running is None:
            return 0
        process = self.running
        self.running = None
        with process:  # closes its pipes
            process.send_signal(number)
            return process.wait(DEADLINE_SECONDS)


class Endpoint(ABC):
    """Clients and metrics of the service at `url`."""

    clients: list[KvrecallClient | httpx.Client]

    @property
    def operations(self) -> list[str]:
        """Addresses of the workers' ports for operators."""
        return []

    @property
    @abstractmethod
    def url(self) -> str:
        """Address of the HTTP API."""

    @cached_property
    def http(self) -> httpx.Client:
        """Plain HTTP client of the test's own thread."""
        client = httpx.Client(base_url=self.url, timeout=DEADLINE_SECONDS)
        self.clients.append(client)
        return client

    @cached_property
    def own(self) -> KvrecallClient:
        """KvrecallClient of the test's own thread."""
        return self.client()

    def client(self) -> KvrecallClient:
        """A new client, for another thread; closed with the server."""
        client = KvrecallClient(self.url, timeout_seconds=DEADLINE_SECONDS)
        self.clients.append(client)
        return client

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples that have these labels."""
        return sum(
            sample.value for sample in self.samples(name) if labels.items() <= sample.labels.items()
        )

    def samples(self, name: str) -> list[Sample]:
        """Samples of a metric, one for each set of labels, of all processes that answer."""
        pages = [self.http.get("/metrics").raise_for_status().text]
        for address in self.operations:
            with suppress(httpx.TransportError):
                pages.append(httpx.get(f"http://{address}/metrics", timeout=60).text)
        families = (family for page in pages for family in text_string_to_metric_families(page))
        return [sample for family in families for sample in family.samples if sample.name == name]

    def close(self) -> None:
        """Close all clients."""
        while self.clients:
            self.clients.pop().close()
        for name in ("http", "own"):
            self.__dict__.pop(name, None)


@dataclass
class Server(Endpoint):
    """One `kvrecall serve` over one data directory; it can be killed, stopped and started again."""

    folder: Path
    environment: Mapping[str, str]
    serving: Process | None = None
    clients: list[KvrecallClient | httpx.Client] = field(default_factory=list)
    workers: int = 1
    _url: str = ""

    @property
    def url(self) -> str:
        """Address of its latest start."""
        return self._url

    @property
    def data(self) -> Path:
        """Its data directory."""
        return self.folder / "data"

    @property
    def rows(self) -> list[Path]:
        """Folders of the segment files."""
        return [self.data / "pages"]

    @property
    def process(self) -> "ForkedProcess | subprocess.Popen[bytes] | None":
        """The running process."""
        return None if self.serving is None else self.serving.running

    def start(self) -> None:
        """Start it and wait until it listens."""
        needs = ServerNeeds(
            slots=SLOTS, max_budget=MAX_BUDGET, block_tokens=BLOCK_TOKENS, data=self.data
        )
        arguments = ["--host", "127.0.0.1", "--port", "0", *needs.arguments()]
        self.serving = Process("serve", arguments, self.folder / "server.log", self.environment)
        self.serving.start()
        self._url = self.serving.address

    def kill(self) -> None:
        """Kill it (SIGKILL)."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """Terminate it (SIGTERM); returns its exit code."""
        return self._end(signal.SIGTERM)

    def _end(self, number: int) -> int:
        code = 0 if self.serving is None else self.serving.end(number)
        self.close()
        return code


@dataclass
class Cluster(Endpoint):
    """Two workers and some gateways with catalog and rows in one Redis.

    `url` is the first gateway's.
    """

    folder: Path
    environment: Mapping[str, str]
    gateways: list[Process] = field(default_factory=list)
    of_name: dict[str, Process] = field(default_factory=dict)
    of_operations: dict[str, str] = field(default_factory=dict)
    clients: list[KvrecallClient | httpx.Client] = field(default_factory=list)

    def __post_init__(self) -> None:
        limits = ["--slots", str(SLOTS), "--budget", str(MAX_BUDGET), "--block", str(BLOCK_TOKENS)]
        for name in ("one", "two"):
            arguments = [
                "--name",
                name,
                "--listen",
                "127.0.0.1:0",
                "--ops",
                self.of_operations.setdefault(name, f"127.0.0.1:{free_port()}"),
                "--data",
                str(self.folder / name),
                *limits,
            ]
            self.of_name[name] = Process(
                "worker", arguments, self.folder / f"{name}.log", self.environment
            )

    @property
    def url(self) -> str:
        """Of the first gateway."""
        return self.gateways[0].address

    @property
    def workers(self) -> int:
        """Number of workers."""
        return len(self.of_name)

    @property
    def operations(self) -> list[str]:
        """Addresses of the workers' ports for operators."""
        return list(self.of_operations.values())

    @property
    def rows(self) -> list[Path]:
        """Folders of the segment files."""
        return [self.folder / name / "pages" for name in self.of_name]

    @property
    def process(self) -> "ForkedProcess | subprocess.Popen[bytes] | None":
        """Of the first gateway."""
        return self.gateways[0].running

    def start(self, gateways: int = 1) -> None:
        """Start everything, and return when the gateways know both workers."""
        for number in range(gateways):
            arguments = ["--port", "0", "--data", str(self.folder / f"gateway-{number}")]
            log = self.folder / f"gateway-{number}.log"
            self.gateways.append(Process("gateway", arguments, log, self.environment))
        with ThreadPoolExecutor() as threads:
            list(threads.map(Process.start, [*self.of_name.values(), *self.gateways]))
        for gateway in self.gateways:
            until(partial(self._knows_both, gateway), "both workers")

    def _knows_both(self, gateway: Process) -> bool:
        """True if a gateway has both workers where they are now, not where a killed one was."""
        workers = httpx.get(f"{gateway.address}/v1/workers").raise_for_status().json()["workers"]
        found = {each["name"]: each["address"] for each in workers if not each["draining"]}
        return found == {name: process.address for name, process in self.of_name.items()}

    def run_keys(self, *words: str) -> str:
        """Run `kvrecall keys` over the catalog; return what it prints."""
        done = subprocess.run(
            [sys.executable, "-m", "kvrecall_server.cli", "keys", *words],
            env=os.environ | QUIET | dict(self.environment),
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    def owner(self, session: str) -> Process:
        """The worker that owns a session."""
        return self.of_name[self.own.get_session(session).worker]

    def back(self) -> None:
        """Start ended workers again, and wait until all gateways know both."""
        for process in self.of_name.values():
            if process.running is None:
                process.start()
        for gateway in self.gateways:
            until(partial(self._knows_both, gateway), "both workers")

    def kill(self) -> None:
        """Kill it (SIGKILL)."""
        self.close()
        for process in (*self.gateways, *self.of_name.values()):
            process.end(signal.SIGKILL)


def until(
    holds: Callable[[], bool], what: str, seen: Callable[[], object] = lambda: "no more"
) -> None:
    """Wait until `holds`. Fails after `DEADLINE_SECONDS` and says what is `seen` instead."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not holds():
        assert time.monotonic() < deadline, f"not in {DEADLINE_SECONDS} s: {what}, but {seen()}"
        time.sleep(0.01)
