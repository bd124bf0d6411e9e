"""Real gateway and worker processes over the reference model, for tests of their logs and traces."""

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvrecall.client import KvrecallClient
from tests.end_to_end.servers import DEADLINE_SECONDS, Json, Process

LIMITS = ("--slots", "2", "--budget", "256", "--block", "64")
WORKER = "w-one"


@dataclass
class Pair:
    """A gateway and its worker, each with a log of its own."""

    gateway: Process
    worker: Process
    clients: ExitStack = field(default_factory=ExitStack)

    @property
    def url(self) -> str:
        """Address of the gateway."""
        return self.gateway.address

    def client(self, **options: Any) -> KvrecallClient:
        """A client of the gateway, closed with the processes."""
        client = KvrecallClient(self.url, timeout_seconds=DEADLINE_SECONDS, **options)
        return self.clients.enter_context(client)

    def stop(self) -> tuple[int, int]:
        """Terminate both, the gateway first; returns their exit codes."""
        self.clients.close()
        return self.gateway.end(signal.SIGTERM), self.worker.end(signal.SIGTERM)


def read_lines(log: Path) -> list[Json]:
    """Parse a log; every line of it must be a JSON object."""
    lines = []
    for text in log.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            pytest.fail(f"{log.name} has a line that is no JSON: {text!r}")
        assert isinstance(line, dict), text
        lines.append(line)
    return lines


@pytest.fixture(scope="session")
def new_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Pair]]:
    """Starts a gateway and a worker; keywords: environment of both."""
    made: list[Pair] = []

    def start(**environment: str) -> Pair:
        folder = tmp_path_factory.mktemp("pair")
        listen = ["--listen", "127.0.0.1:0", "--name", WORKER]
        worker = Process(
            "worker",
            [*listen, "--data", str(folder / "worker"), *LIMITS],
            folder / "worker.log",
            environment,
        )
        worker.start()
        gateway = Process(
            "gateway",
            ["--worker", worker.address, "--port", "0", "--data", str(folder / "gateway")],
            folder / "gateway.log",
            environment,
        )
        made.append(Pair(gateway, worker))
        gateway.start()
        return made[-1]

    yield start
    for pair in made:
        pair.clients.close()
        for process in (pair.gateway, pair.worker):
            process.end(signal.SIGKILL)


def ask(text: str) -> Json:
    """A user's message."""
    return {"role": "user", "content": text}


def call_tool(call: str, **arguments: str) -> Json:
    """A recorded answer that calls a tool, which begins a pause."""
    function = {"name": "look_up", "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": call, "function": function}],
    }
