"""Redis behind sentinels, and a Redis cluster, under faults."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.faults.rig.processes import until
from benchmarks.faults.rig.redis_process import RedisProcess

SLOTS = 16384
_SYNC = {"repl-diskless-sync": "yes", "repl-diskless-sync-delay": "0"}


class Sentinels:
    """A primary with a replica, and three sentinels that fail over within seconds."""

    def __init__(self, folder: Path) -> None:
        self.primary = RedisProcess(folder / "primary", _SYNC)
        self.replica = RedisProcess(folder / "replica", _SYNC, primary=self.primary)
        watch = [
            f"sentinel monitor rows 127.0.0.1 {self.primary.port} 2",
            "sentinel down-after-milliseconds rows 1500",
            "sentinel failover-timeout rows 6000",
        ]
        self.sentinels = [
            RedisProcess(folder / f"sentinel-{number}", config=watch) for number in range(3)
        ]

    @property
    def url(self) -> str:
        """URL of the service that the sentinels watch."""
        hosts = ",".join(f"127.0.0.1:{each.port}" for each in self.sentinels)
        return f"redis+sentinel://{hosts}/rows"

    def start(self) -> None:
        """Start all, and wait until they know each other."""
        for each in (self.primary, self.replica, *self.sentinels):
            each.start()
        until(lambda: _online_replicas(self.primary) == 1, "the replica follows")
        for sentinel in self.sentinels:
            until(_knows_all(sentinel), "the sentinels know each other")

    def fail_over(self) -> None:
        """Kill the primary, and start it again when the replica has its place."""
        self.primary.kill()
        until(lambda: _role(self.replica) == "master", "the replica is promoted")
        # As the sentinels configure it: it must not serve what it missed.
        self.primary.primary, self.replica.primary = self.replica, None
        self.primary.start()

    def kill(self) -> None:
        """Kill all."""
        for each in (self.primary, self.replica, *self.sentinels):
            each.kill()


class Shards:
    """A cluster of three primaries without replicas."""

    def __init__(self, folder: Path) -> None:
        settings = {"cluster-enabled": "yes", "cluster-node-timeout": "3000"}
        self.nodes = [RedisProcess(folder / f"node-{number}", settings) for number in range(3)]

    @property
    def url(self) -> str:
        """URL of the cluster."""
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def start(self) -> None:
        """Start all nodes, with a third of the slots each."""
        for node in self.nodes:
            node.start()
        bounds = [SLOTS * number // 3 for number in range(4)]
        for number, node in enumerate(self.nodes):
            _command(node, "CLUSTER SET-CONFIG-EPOCH", number + 1)
            _command(self.nodes[0], "CLUSTER MEET", "127.0.0.1", node.port)
            _command(node, "CLUSTER ADDSLOTS", *range(bounds[number], bounds[number + 1]))
        for node in self.nodes:
            until(_is_up(node), "the cluster is up")

    def move_slots(self, source: int, target: int, share: float) -> None:
        """Move a share of the slots of one node to another, with their keys, under use."""
        giver, taker = self.nodes[source], self.nodes[target]
        names = {node.port: _command(node, "CLUSTER MYID").decode() for node in (giver, taker)}
        first, end = SLOTS * source // 3, SLOTS * (source + 1) // 3
        for slot in range(first, first + int((end - first) * share)):
            _command(taker, "CLUSTER SETSLOT", slot, "IMPORTING", names[giver.port])
            _command(giver, "CLUSTER SETSLOT", slot, "MIGRATING", names[taker.port])
            while keys := _command(giver, "CLUSTER GETKEYSINSLOT", slot, 100):
                arguments = ("", 0, 60000, "KEYS", *keys)
                _command(giver, "MIGRATE", "127.0.0.1", taker.port, *arguments)
            for node in (taker, giver, *self.nodes):
                _command(node, "CLUSTER SETSLOT", slot, "NODE", names[taker.port])

    def kill(self) -> None:
        """Kill all."""
        for node in self.nodes:
            node.kill()


def _command(node: RedisProcess, *words: Any) -> Any:
    with node.client() as client:
        return client.execute_command(*words)


def _role(node: RedisProcess) -> str:
    with node.client() as client:
        return str(client.info("replication")["role"])


def _online_replicas(node: RedisProcess) -> int:
    with node.client() as client:
        values = client.info("replication").values()
    return sum(isinstance(value, dict) and value.get("state") == "online" for value in values)


def _knows_all(sentinel: RedisProcess) -> Callable[[], bool]:
    def known() -> bool:
        with sentinel.client() as client:
            state: Any = client.sentinel_master("rows")
        return (state["num-slaves"], state["num-other-sentinels"]) == (1, 2)

    return known


def _is_up(node: RedisProcess) -> Callable[[], bool]:
    return lambda: _command(node, "CLUSTER INFO")["cluster_state"] == "ok"
