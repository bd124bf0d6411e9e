"""Servers for the end-to-end tests, in processes of their own on free ports of this machine.

Either `kvrecall serve`, with all in one process, or a gateway and two workers on one Redis.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from uuid import uuid4

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvrecall.app.local_server import ServerNeeds, launch
from kvrecall.client import KvrecallClient
from reference import MODEL_PATH

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
QUIET = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

Json = dict[str, Any]


@dataclass
class Process:
    """A serving command of kvrecall, which can be ended and started again."""

    command: str
    arguments: list[str]
    log: Path
    environment: Mapping[str, str]
    address: str = ""
    running: "subprocess.Popen[bytes] | None" = None

    def start(self) -> None:
        """Start it and wait until it listens."""
        environment = os.environ | QUIET | dict(self.environment)
        arguments = [*self.arguments, "--log", "json"]
        self.running, self.address = launch(
            arguments, self.log, self.command, environment=environment
        )

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
        page = self.http.get("/metrics").raise_for_status()
        samples = [
            sample
            for family in text_string_to_metric_families(page.text)
            for sample in family.samples
        ]
        return sum(
            s.value for s in samples if s.name == name and labels.items() <= s.labels.items()
        )

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
    def process(self) -> "subprocess.Popen[bytes] | None":
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
    clients: list[KvrecallClient | httpx.Client] = field(default_factory=list)

    def __post_init__(self) -> None:
        limits = ["--slots", str(SLOTS), "--budget", str(MAX_BUDGET), "--block", str(BLOCK_TOKENS)]
        for name in ("one", "two"):
            arguments = [
                "--name",
                name,
                "--listen",
                "127.0.0.1:0",
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
    def rows(self) -> list[Path]:
        """Folders of the segment files."""
        return [self.folder / name / "pages" for name in self.of_name]

    @property
    def process(self) -> "subprocess.Popen[bytes] | None":
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

    def known(self, at: str = "") -> list[str]:
        """Workers that take sessions, according to a gateway. Default: the first one."""
        workers = httpx.get(f"{at or self.url}/v1/workers").raise_for_status().json()["workers"]
        return [each["name"] for each in workers if not each["draining"]]

    def _knows_both(self, gateway: Process) -> bool:
        return len(self.known(gateway.address)) == 2

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


def chatter(seed: int, sentences: int) -> str:
    """Generated text of `sentences` sentences with about 14 tokens each."""
    rng = random.Random(seed)
    names = ("Ada", "Ben", "Clara", "David", "Emma", "Frank")
    things = ("locker", "garage", "office", "garden")
    templates = (
        "The code of {name}'s {thing} is {code}.",
        "{name} called about the {thing} again today.",
        "By the way, the {thing} of {name} has number {code}.",
        "I think that {name} will be late, the {thing} is closed.",
    )
    return " ".join(
        rng.choice(templates).format(
            name=rng.choice(names), thing=rng.choice(things), code=rng.randrange(1000, 10000)
        )
        for _ in range(sentences)
    )


def user(text: str) -> Json:
    """A user's message."""
    return {"role": "user", "content": text}


def asks(call: str, **arguments: str) -> Json:
    """A recorded assistant message that calls a tool; like a generated one, it starts a pause."""
    function = {"name": "look_up", "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": call, "function": function}],
    }


def until(holds: Callable[[], bool], what: str) -> None:
    """Wait until `holds`. Fails after `DEADLINE_SECONDS`."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not holds():
        assert time.monotonic() < deadline, f"not within {DEADLINE_SECONDS} s: {what}"
        time.sleep(0.01)


def is_idle(client: KvrecallClient, session: str) -> bool:
    """True if the session is idle."""
    return client.get_session(session).state == "idle"


@pytest.fixture(scope="session")
def say() -> SimpleNamespace:
    """Functions that make messages and wait for conditions."""
    return SimpleNamespace(chatter=chatter, user=user, asks=asks, until=until, is_idle=is_idle)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reference model without its end-of-turn token: replies are as long as max_tokens.

    The turns that these tests interrupt must be long.
    """
    folder = tmp_path_factory.mktemp("model") / "endless"
    shutil.copytree(MODEL_PATH, folder)
    for name in ("config.json", "generation_config.json"):
        config = json.loads((folder / name).read_text(encoding="utf-8"))
        (folder / name).write_text(
            json.dumps(config | {"eos_token_id": config["pad_token_id"]}), encoding="utf-8"
        )
    return folder


@pytest.fixture(scope="session")
def command() -> type[Process]:
    """Class of a process of a kvrecall command; the test ends it."""
    return Process


@pytest.fixture(scope="session")
def new_server(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Server]]:
    """Makes servers over empty data directories, not started; keywords: environment."""
    made: list[Server] = []

    def make(**environment: str) -> Server:
        made.append(
            Server(tmp_path_factory.mktemp("server"), {"KVRECALL_MODEL": str(model), **environment})
        )
        return made[-1]

    yield make
    for server in made:
        server.kill()


@pytest.fixture(scope="session")
def new_cluster(
    model: Path, tmp_path_factory: pytest.TempPathFactory, redis_url: str
) -> Iterator[Callable[..., Cluster]]:
    """Makes empty clusters, not started; keywords: environment of all processes."""
    made: list[Cluster] = []

    def make(**environment: str) -> Cluster:
        shared = {
            "KVRECALL_MODEL": str(model),
            "KVRECALL_CATALOG_URL": redis_url,
            "KVRECALL_STORE__REDIS_URL": redis_url,
            "KVRECALL_STORE__REDIS_NAMESPACE": uuid4().hex,
        }
        made.append(Cluster(tmp_path_factory.mktemp("cluster"), shared | environment))
        return made[-1]

    yield make
    for cluster in made:
        cluster.kill()


@pytest.fixture(scope="session")
def shared_server(new_server: Callable[..., Server]) -> Server:
    """One process, shared by the tests."""
    server = new_server(**SMALL_LIMITS)
    server.start()
    return server


@pytest.fixture(scope="session")
def shared_cluster(new_cluster: Callable[..., Cluster]) -> Cluster:
    """Two workers on Redis, shared by the tests."""
    cluster = new_cluster(**SMALL_LIMITS)
    cluster.start()
    return cluster


@pytest.fixture(scope="session", params=["one process", "two workers on Redis"])
def server(request: pytest.FixtureRequest) -> Server | Cluster:
    """The shared servers, with small limits; each test runs with both."""
    # Requested, not made here: it would be started again after each test with the other one.
    name = "shared_server" if request.param == "one process" else "shared_cluster"
    return cast("Server | Cluster", request.getfixturevalue(name))


@pytest.fixture
def client(server: Server | Cluster) -> KvrecallClient:
    """A client of the shared server."""
    return server.own


@pytest.fixture
def new_session(client: KvrecallClient) -> Callable[..., str]:
    """Creates sessions of the shared server: small budget, greedy, with repair rows."""

    def make(**settings: Any) -> str:
        return client.create_session(**{"budget": 128, "repair_rows": 32, "seed": 7, **settings}).id

    return make


@pytest.fixture(scope="module")
def live_url(server: Server | Cluster) -> str:
    """Address of the shared server, by the name that the OpenAPI tests use."""
    return server.url
