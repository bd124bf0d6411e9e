"""Faults, one function each. A fault is injected at once and may return a function to undo it."""

import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from random import Random

import redis

from benchmarks.faults import clock
from benchmarks.faults.flips import flip_in_files, flip_in_redis
from benchmarks.faults.proxy import Proxy
from benchmarks.faults.setups import Setup

Undo = Callable[[], None]
Inject = Callable[[Setup, Random], Undo | None]
HOUR = 3600.0


class NothingToHitError(Exception):
    """There is no target for this fault yet, such as a page whose bit could be flipped."""


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
        is_late = kind in LATE and rng.random() < 0.3
        seconds = rng.uniform(6.0, 14.0) if is_late else rng.uniform(0.2, 3.0)
        yield Fault(
            rng.uniform(0.05, 1.5), kind, f"{seed} {number}", seconds, lasts=rng.random() < 0.25
        )


def kill_worker(setup: Setup, rng: Random) -> None:
    """Kill -9 of a worker, restarted within a second."""
    server = rng.choice(setup.workers)
    server.kill()
    time.sleep(rng.uniform(0, 1))
    server.start()


def kill_worker_twice(setup: Setup, rng: Random) -> None:
    """Kill -9 of a worker, and again while it starts."""
    server = rng.choice(setup.workers)
    server.kill()
    server.start_and_kill(rng.uniform(1, 8))
    server.start()


def kill_gateway(setup: Setup, rng: Random) -> None:
    """Kill -9 of a gateway, restarted at once."""
    server = rng.choice(setup.gateways)
    server.kill()
    server.start()


def kill_all(setup: Setup, rng: Random) -> None:
    """A power failure: everything is killed at once and restarted."""
    for server in rng.sample(setup.servers, len(setup.servers)):
        server.kill()
    if setup.redis is not None:
        setup.redis.kill()
    setup.start()


def kill_redis(setup: Setup, rng: Random) -> Undo:
    """Kill -9 of Redis, which is restarted when the fault is undone."""
    assert setup.redis is not None, "a cluster has one"
    setup.redis.kill()
    return setup.redis.start


def stop_worker(setup: Setup, rng: Random) -> Undo:
    """SIGSTOP of a worker, SIGCONT later: the writes that it then resumes may be late."""
    server = rng.choice(setup.workers)
    server.send(signal.SIGSTOP)
    return lambda: server.send(signal.SIGCONT)


def stop_gateway(setup: Setup, rng: Random) -> Undo:
    """SIGSTOP of a gateway, SIGCONT later."""
    server = rng.choice(setup.gateways)
    server.send(signal.SIGSTOP)
    return lambda: server.send(signal.SIGCONT)


def fill_disk(setup: Setup, rng: Random) -> Undo:
    """A full disk, with room for a few bytes or none."""
    ids = setup.ids
    setup.disk.fill(rng.choice((0, 4096, rng.randrange(1 << 20))), ids)
    return lambda: setup.disk.free(ids)


def kill_on_full_disk(setup: Setup, rng: Random) -> None:
    """A full disk; a while later a worker is killed, and there is room again."""
    undo = fill_disk(setup, rng)
    time.sleep(rng.uniform(0.2, 2))
    server = rng.choice(setup.workers)
    server.kill()
    undo()
    server.start()


def flip_in_payload(setup: Setup, rng: Random) -> None:
    """A flipped bit in a page of a file, under a running process."""
    if flip_in_files(rng.choice(setup.pages), "payload", rng) is None:
        raise NothingToHitError


def flip_in_header(setup: Setup, rng: Random) -> None:
    """A flipped bit in a record header of a segment file, under a running process."""
    if flip_in_files(rng.choice(setup.pages), "header", rng) is None:
        raise NothingToHitError


def flip_while_down(setup: Setup, rng: Random) -> None:
    """A killed worker whose files have flipped bits when it restarts."""
    server = rng.choice(setup.workers)
    server.kill()
    folder = setup.pages[setup.workers.index(server)]
    hit = [
        flip_in_files(folder, rng.choice(("header", "payload")), rng)
        for _ in range(rng.randrange(1, 4))
    ]
    server.start()
    if not any(hit):
        raise NothingToHitError


def lose_files(setup: Setup, rng: Random) -> None:
    """A killed worker whose segment files are all deleted when it restarts."""
    server = rng.choice(setup.workers)
    server.kill()
    for segment in setup.pages[setup.workers.index(server)].glob("segment-*.kv"):
        segment.unlink()
    server.start()


def flip_in_redis_page(setup: Setup, rng: Random) -> None:
    """A flipped bit in a page in Redis."""
    assert setup.redis is not None, "a cluster has one"
    try:
        with setup.redis.client() as client:
            flipped = flip_in_redis(client, rng)
    except redis.ConnectionError as error:  # still down because of an earlier fault
        raise NothingToHitError from error
    if flipped is None:
        raise NothingToHitError


def jump_clock(setup: Setup, rng: Random) -> None:
    """A jump of a process's wall clock by hours, forward or back, for good."""
    clock.set_offset(
        rng.choice(setup.servers).clock, rng.choice((-1, 1)) * rng.uniform(0.01, 30) * HOUR
    )


def cut_to_worker(setup: Setup, rng: Random) -> None:
    """Broken connections between gateways and a worker."""
    rng.choice(setup.to_workers).cut()


def cut_to_redis(setup: Setup, rng: Random) -> None:
    """Broken connections between a process and Redis."""
    rng.choice(setup.to_redis).cut()


def degrade_worker_link(setup: Setup, rng: Random) -> Undo:
    """A slow, silent or closed connection to a worker, for a while."""
    return _degrade(rng.choice(setup.to_workers), rng)


def degrade_redis_link(setup: Setup, rng: Random) -> Undo:
    """A slow, silent or closed connection of a process to Redis, for a while."""
    return _degrade(rng.choice(setup.to_redis), rng)


def _degrade(proxy: Proxy, rng: Random) -> Undo:
    mode = rng.choice(("slow", "silent", "closed"))
    if mode == "slow":
        proxy.delay(rng.uniform(0.01, 0.5))
    elif mode == "silent":
        proxy.stall()
    else:
        proxy.refuse()
    return proxy.heal


# Faults by their name in the result. `kvrecall serve` is its own worker and gateway.
KINDS: Mapping[str, Inject] = {
    "kill -9, worker": kill_worker,
    "kill -9, worker, again while it starts": kill_worker_twice,
    "kill -9, gateway": kill_gateway,
    "kill -9, Redis": kill_redis,
    "kill -9, all": kill_all,
    "SIGSTOP, worker": stop_worker,
    "SIGSTOP, gateway": stop_gateway,
    "connections cut, gateway to worker": cut_to_worker,
    "connections cut, to Redis": cut_to_redis,
    "connection slow, silent or closed, gateway to worker": degrade_worker_link,
    "connection slow, silent or closed, to Redis": degrade_redis_link,
    "disk full": fill_disk,
    "disk full, then kill -9": kill_on_full_disk,
    "bit flipped in a page": flip_in_payload,
    "bit flipped in a segment header": flip_in_header,
    "bits flipped while killed": flip_while_down,
    "all files lost while killed": lose_files,
    "bit flipped in Redis": flip_in_redis_page,
    "clock jumps": jump_clock,
}
# Faults that are often undone late, when the session's lease has expired and it has moved.
LATE = (
    "SIGSTOP, worker",
    "SIGSTOP, gateway",
    "kill -9, Redis",
    "connection slow, silent or closed, to Redis",
)
# Relative frequency of each fault of a single process.
EMBEDDED: Mapping[str, float] = {
    "kill -9, worker": 5,
    "kill -9, worker, again while it starts": 1,
    "SIGSTOP, worker": 3,
    "disk full": 4,
    "disk full, then kill -9": 2,
    "bit flipped in a page": 4,
    "bit flipped in a segment header": 3,
    "bits flipped while killed": 4,
    "all files lost while killed": 1,
    "clock jumps": 3,
}
# Relative frequency of each fault of a cluster.
CLUSTER: Mapping[str, float] = {
    "kill -9, worker": 4,
    "kill -9, worker, again while it starts": 1,
    "kill -9, gateway": 3,
    "kill -9, Redis": 4,
    "kill -9, all": 1,
    "SIGSTOP, worker": 4,
    "SIGSTOP, gateway": 3,
    "connections cut, gateway to worker": 4,
    "connections cut, to Redis": 4,
    "connection slow, silent or closed, gateway to worker": 3,
    "connection slow, silent or closed, to Redis": 3,
    "disk full": 2,
    "disk full, then kill -9": 1,
    "bit flipped in a page": 2,
    "bit flipped in a segment header": 1,
    "bits flipped while killed": 2,
    "all files lost while killed": 3,
    "bit flipped in Redis": 5,
    "clock jumps": 3,
}
