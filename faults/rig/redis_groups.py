"""Redis behind sentinels, and a Redis cluster, of benchmarks, which faults may hit."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from faults.rig.processes import until
from faults.rig.redis_process import RedisProcess

_SLOTS = 16384
_PRIMARIES = 3
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
    """A cluster of three primaries, with a replica each if there are to be `replicas`."""

    def __init__(self, folder: Path, replicas: bool = False) -> None:
        settings = {"cluster-enabled": "yes", "cluster-node-timeout": "15000", **_SYNC}
        nodes = [
            RedisProcess(folder / f"node-{number}", settings)
            for number in range(_PRIMARIES * (1 + replicas))
        ]
        self.primaries, self.replicas = nodes[:_PRIMARIES], nodes[_PRIMARIES:]

    @property
    def url(self) -> str:
        """URL of the cluster."""
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.primaries)

    def start(self) -> None:
        """Start all nodes, with a third of the slots for each primary, and wait until all serve."""
        nodes = [*self.primaries, *self.replicas]
        for epoch, node in enumerate(nodes, 1):
            node.start()
            _command(node, "CLUSTER SET-CONFIG-EPOCH", epoch)
            _command(nodes[0], "CLUSTER MEET", "127.0.0.1", node.port)
        for number, node in enumerate(self.primaries):
            _command(node, "CLUSTER ADDSLOTS", *_slots(number))
        for primary, replica in zip(self.primaries, self.replicas, strict=False):
            name = _command(primary, "CLUSTER MYID").decode()
            until(partial(_knows, replica, name), "the replica knows its primary")
            _command(replica, "CLUSTER REPLICATE", name)
        for node in nodes:
            until(partial(_is_up, node), "the cluster is up")
        for primary in self.primaries[: len(self.replicas)]:
            until(partial(_online_replicas, primary), "the replica follows")

    def move_slots(self, source: int, target: int, share: float) -> None:
        """Move a share of the slots of one primary to another, with their keys, under use."""
        giver, taker = self.primaries[source], self.primaries[target]
        names = {node.port: _command(node, "CLUSTER MYID").decode() for node in (giver, taker)}
        slots = _slots(source)
        for slot in slots[: int(len(slots) * share)]:
            _command(taker, "CLUSTER SETSLOT", slot, "IMPORTING", names[giver.port])
            _command(giver, "CLUSTER SETSLOT", slot, "MIGRATING", names[taker.port])
            while keys := _command(giver, "CLUSTER GETKEYSINSLOT", slot, 100):
                arguments = ("", 0, 60000, "KEYS", *keys)
                _command(giver, "MIGRATE", "127.0.0.1", taker.port, *arguments)
            for node in dict.fromkeys((taker, giver, *self.primaries)):
                _command(node, "CLUSTER SETSLOT", slot, "NODE", names[taker.port])

    def kill(self) -> None:
        """Kill all."""
        for node in (*self.primaries, *self.replicas):
            node.kill()


def _slots(number: int) -> range:
    """Slots of a primary at the start."""
    return range(_SLOTS * number // _PRIMARIES, _SLOTS * (number + 1) // _PRIMARIES)


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


def _knows(node: RedisProcess, name: str) -> bool:
    return name in str(_command(node, "CLUSTER NODES"))


def _is_up(node: RedisProcess) -> bool:
    return str(_command(node, "CLUSTER INFO")["cluster_state"]) == "ok"
