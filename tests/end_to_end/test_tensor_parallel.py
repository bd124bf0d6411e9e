"""A worker of two ranks beside one of a single process, behind one gateway, without Redis.

Sessions answer as in one process, go on after a restart, move to the other worker and back by replay.
When a rank is killed the whole worker ends, and starts again.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from faults.rig.ports import free_port
from kvrecall.client import KvrecallClient
from reference import MODEL_PATH

ENVIRONMENT = {
    "KVRECALL_MODEL": str(MODEL_PATH),
    "KVRECALL_DTYPE": "float32",
    "OMP_NUM_THREADS": "1",
}
SETTINGS: dict[str, Any] = {"budget": 96, "seed": 1}
# All ranks end so soon after one of them was killed; of an idle worker it takes two seconds.
GONE_SECONDS = 60.0


@dataclass
class Cluster:
    """Both workers, by name, and a client of their gateway."""

    processes: dict[str, Any]
    client: KvrecallClient

    def ranks(self) -> list[psutil.Process]:
        """The rank processes of the worker that has several, in their order."""
        launcher = psutil.Process(self.processes["pair"].running.pid)
        ranks = [each for each in launcher.children(recursive=True) if "RANK" in each.environ()]
        return sorted(ranks, key=lambda each: int(each.environ()["RANK"]))


@pytest.fixture(scope="module")
def cluster(
    command: Callable[..., Any], say: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("ranks")
    processes = {
        "pair": _worker(command, folder, "pair", "--tensor-parallel", "2"),
        "single": _worker(command, folder, "single"),
    }
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda process: process.start(), processes.values()))
    addresses = ",".join(process.address for process in processes.values())
    arguments = ["--worker", addresses, "--port", "0", "--data", str(folder / "gateway")]
    gateway = command("gateway", arguments, folder / "gateway.log", ENVIRONMENT)
    try:
        gateway.start()
        with KvrecallClient(gateway.address, timeout_seconds=300.0) as client:
            say.until(lambda: len(client.workers()) == 2, "both workers")
            yield Cluster(processes, client)
    finally:
        for process in (*processes.values(), gateway):
            process.end(signal.SIGTERM if process is processes["pair"] else signal.SIGKILL)


def _worker(command: Callable[..., Any], folder: Path, name: str, *more: str) -> Any:
    listen = f"127.0.0.1:{free_port()}"
    arguments = ["--name", name, "--listen", listen, "--data", str(folder / name), "--ram", "64"]
    arguments += ["--slots", "2", "--budget", "256", "--block", "64", *more]
    return command("worker", arguments, folder / f"{name}.log", ENVIRONMENT, forked=False)


def test_a_session_goes_on_through_restarts_moves_and_the_death_of_a_rank(
    cluster: Cluster, say: Any
) -> None:
    client = cluster.client
    by_address = {process.address: name for name, process in cluster.processes.items()}
    workers = {by_address.get(each.name, each.name): each.name for each in client.workers()}
    sessions = {name: client.create_session(**SETTINGS).id for name in ("pair", "single")}

    def turn(seed: int) -> None:
        """Take the same turn with both sessions, whose answers are the same."""
        message = [say.user(say.chatter(seed, 12))]
        said = {
            name: client.turn(id, message, max_tokens=16, temperature=0).text
            for name, id in sessions.items()
        }
        assert said["pair"] == said["single"]

    client.move(sessions["pair"], workers["pair"])
    client.move(sessions["single"], workers["single"])
    turn(1)
    turn(2)
    assert client.get_session(sessions["pair"]).worker == workers["pair"]
    # A restart: rows are where each rank has stored them.
    pair = cluster.processes["pair"]
    ranks = cluster.ranks()
    assert len(ranks) == 2
    assert pair.end(signal.SIGTERM) == 0
    assert not any(map(psutil.Process.is_running, ranks))
    pair.start()
    say.until(lambda: len(client.workers()) == 2, "both workers")
    turn(3)
    # A move there and back: the log is replayed, since the other one has rows of other heads.
    client.move(sessions["pair"], workers["single"])
    turn(4)
    client.move(sessions["pair"], workers["pair"])
    turn(5)
    for number in (1, 0):
        _kill_rank(cluster, number)
        pair.start()
        say.until(lambda: len(client.workers()) == 2, "both workers")
        turn(6 + number)


def _kill_rank(cluster: Cluster, number: int) -> None:
    """Kill a rank: all processes of the worker end."""
    pair = cluster.processes["pair"]
    ranks = cluster.ranks()
    began = time.monotonic()
    os.kill(ranks[number].pid, signal.SIGKILL)
    assert pair.running.wait(GONE_SECONDS) != 0
    _, alive = psutil.wait_procs(ranks, timeout=GONE_SECONDS)
    assert not alive
    print(f"rank {number} killed: {time.monotonic() - began:.1f} s")
    pair.running = None
