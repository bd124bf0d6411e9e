"""The kinds of faults by name, their frequencies, and a seeded schedule of them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from random import Random

from faults.kinds import kills, network, storage
from faults.kinds.base import Inject


@dataclass(frozen=True)
class Fault:
    """One fault of a schedule.

    `after` is the delay after the fault before, `seconds` the time until it is undone, both in
    seconds. A fault that `lasts` is undone only after the next one has happened.
    """

    after: float
    kind: str
    seed: str
    seconds: float
    lasts: bool


def schedule(weights: Mapping[str, float], seed: str) -> Iterator[Fault]:
    """An endless sequence of faults, a function of the weights and the seed."""
    rng = Random(seed)
    kinds = list(weights)
    shares = list(weights.values())
    for number in count():
        kind = rng.choices(kinds, shares)[0]
        is_late = kind in LATE and rng.random() < 0.2
        seconds = rng.uniform(5.0, 12.0) if is_late else rng.uniform(0.2, 2.0)
        yield Fault(
            rng.uniform(0.05, 1.0), kind, f"{seed} {number}", seconds, lasts=rng.random() < 0.25
        )


# Faults by their name in the result. `kvrecall serve` is its own worker and gateway.
KINDS: Mapping[str, Inject] = {
    "kill -9, worker": kills.kill_worker,
    "kill -9, worker, again while it starts": kills.kill_worker_twice,
    "kill -9, gateway": kills.kill_gateway,
    "kill -9, Redis": kills.kill_redis,
    "kill -9, all": kills.kill_all,
    "power lost, all": kills.lose_power,
    "power lost, one machine": kills.lose_power_of_one,
    "SIGSTOP, worker": kills.stop_worker,
    "SIGSTOP, gateway": kills.stop_gateway,
    "SIGSTOP, Redis": kills.stop_redis,
    "SIGTERM, worker": kills.drain_worker,
    "rolling restart": kills.restart_one_by_one,
    "clock jumps": kills.jump_clock,
    "connections cut, gateway to worker": network.cut_to_worker,
    "connections cut, to Redis": network.cut_to_redis,
    "connection slow or refused, gateway to worker": network.degrade_worker_link,
    "connection slow or refused, to Redis": network.degrade_redis_link,
    "partition, gateways and worker": network.part_gateways_from_worker,
    "partition, gateways and worker, one way": network.part_one_way,
    "partition, one gateway and worker": network.part_one_gateway_from_worker,
    "partition, one gateway and worker, one way": network.part_one_gateway_one_way,
    "partition, worker and Redis": network.part_worker_from_redis,
    "partition, gateway and Redis": network.part_gateway_from_redis,
    "partition, process and Redis, one way": network.part_from_redis_one_way,
    "disk full": storage.fill_disk,
    "disk full, then kill -9": storage.kill_on_full_disk,
    "sync slow": storage.sync_slowly,
    "sync hangs": storage.hang_sync,
    "sync fails, pages": storage.fail_sync_of_pages,
    "sync fails, catalog": storage.fail_sync_of_catalog,
    "write fails, catalog": storage.fail_writes_of_catalog,
    "bit flipped in a page": storage.flip_in_payload,
    "bit flipped in a segment header": storage.flip_in_header,
    "bits flipped while killed": storage.flip_while_down,
    "all files lost while killed": storage.lose_files,
    "bit flipped in Redis": storage.flip_in_redis_page,
}
# Faults that are often undone late, when the session's lease has expired and it has moved.
LATE = (
    "SIGSTOP, worker",
    "SIGSTOP, gateway",
    "SIGSTOP, Redis",
    "kill -9, Redis",
    "partition, gateways and worker",
    "partition, gateways and worker, one way",
    "partition, one gateway and worker",
    "partition, one gateway and worker, one way",
    "partition, worker and Redis",
    "partition, gateway and Redis",
    "partition, process and Redis, one way",
    "sync hangs",
)
_FILES: Mapping[str, float] = {
    "disk full": 3,
    "disk full, then kill -9": 2,
    "sync slow": 2,
    "sync hangs": 2,
    "sync fails, pages": 1,
    "sync fails, catalog": 2,
    "write fails, catalog": 2,
    "bit flipped in a page": 3,
    "bit flipped in a segment header": 2,
    "bits flipped while killed": 3,
    "all files lost while killed": 1,
}
_LINKS: Mapping[str, float] = {
    "connections cut, gateway to worker": 4,
    "connection slow or refused, gateway to worker": 3,
    "partition, gateways and worker": 3,
    "partition, gateways and worker, one way": 3,
}
# Relative frequency of each fault of a single process.
EMBEDDED: Mapping[str, float] = {
    "kill -9, worker": 5,
    "kill -9, worker, again while it starts": 1,
    "power lost, all": 5,
    "SIGSTOP, worker": 3,
    "rolling restart": 1,
    "clock jumps": 3,
    **_FILES,
}
# Relative frequency of each fault of two workers with files only.
FILES_ONLY: Mapping[str, float] = {
    "kill -9, worker": 4,
    "kill -9, worker, again while it starts": 1,
    "kill -9, gateway": 3,
    "kill -9, all": 1,
    "power lost, all": 2,
    "power lost, one machine": 3,
    "SIGSTOP, worker": 3,
    "SIGSTOP, gateway": 1,
    "SIGTERM, worker": 2,
    "rolling restart": 1,
    "clock jumps": 2,
    **_LINKS,
    **_FILES,
}
# Relative frequency of each fault of a cluster.
CLUSTER: Mapping[str, float] = {
    "kill -9, worker": 4,
    "kill -9, worker, again while it starts": 1,
    "kill -9, gateway": 3,
    "kill -9, Redis": 3,
    "kill -9, all": 1,
    "power lost, all": 2,
    "power lost, one machine": 2,
    "SIGSTOP, worker": 4,
    "SIGSTOP, gateway": 3,
    "SIGSTOP, Redis": 3,
    "SIGTERM, worker": 2,
    "rolling restart": 1,
    "partition, one gateway and worker": 3,
    "partition, one gateway and worker, one way": 3,
    "connections cut, to Redis": 3,
    "connection slow or refused, to Redis": 3,
    "partition, worker and Redis": 3,
    "partition, gateway and Redis": 3,
    "partition, process and Redis, one way": 3,
    "disk full": 2,
    "disk full, then kill -9": 1,
    "sync slow": 1,
    "sync hangs": 1,
    "sync fails, pages": 1,
    "bit flipped in a page": 2,
    "bit flipped in a segment header": 1,
    "bits flipped while killed": 2,
    "all files lost while killed": 3,
    "bit flipped in Redis": 5,
    "clock jumps": 3,
    **_LINKS,
}
# Only what durable rows survive: with these faults, none may have to be computed again.
POWER: Mapping[str, float] = {"power lost, all": 4, "kill -9, worker": 1}
STALE_WRITERS: Mapping[str, float] = {
    "SIGSTOP, worker": 3,
    "SIGSTOP, gateway": 3,
    "partition, worker and Redis": 2,
    "partition, gateway and Redis": 2,
    "partition, gateways and worker, one way": 2,
    "kill -9, worker": 1,
}
