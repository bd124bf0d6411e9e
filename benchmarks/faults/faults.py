"""What can go wrong, one function each. A fault is done to a set-up at once, and may return how it is undone."""

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
Do = Callable[[Setup, Random], Undo | None]
HOUR = 3600.0


class NothingToHitError(Exception):
    """There is nothing yet that this fault could happen to."""


@dataclass(frozen=True)
class Fault:
    """One fault of a schedule: when, after the one before (seconds), what, and how long until it is undone.

    One that `lasts` is undone only after the next one has happened.
    """

    after: float
    kind: str
    seed: str
    seconds: float
    lasts: bool


def schedule(weights: Mapping[str, float], seed: str) -> Iterator[Fault]:
    """Faults without end, the same for the same seed."""
    rng = Random(seed)
    kinds = list(weights)
    shares = list(weights.values())
    for number in count():
        kind = rng.choices(kinds, shares)[0]
        late = kind in LATE and rng.random() < 0.3
        seconds = rng.uniform(6.0, 14.0) if late else rng.uniform(0.2, 3.0)
        yield Fault(
            rng.uniform(0.05, 1.5), kind, f"{seed} {number}", seconds, lasts=rng.random() < 0.25
        )


def kill_worker(setup: Setup, rng: Random) -> None:
    """kill -9 of a process that computes, started again soon."""
    server = rng.choice(setup.computing)
    server.kill()
    time.sleep(rng.uniform(0, 1))
    server.start()


def kill_worker_twice(setup: Setup, rng: Random) -> None:
    """kill -9 of a process that computes, and again while it starts."""
    server = rng.choice(setup.computing)
    server.kill()
    server.start_and_kill(rng.uniform(1, 8))
    server.start()


def kill_gateway(setup: Setup, rng: Random) -> None:
    """kill -9 of a process that takes requests."""
    server = rng.choice(setup.gateways)
    server.kill()
    server.start()


def kill_all(setup: Setup, rng: Random) -> None:
    """The power fails: everything is killed at once, and started again."""
    for server in rng.sample(setup.servers, len(setup.servers)):
        server.kill()
    if setup.redis is not None:
        setup.redis.kill()
    setup.start()


def kill_redis(setup: Setup, rng: Random) -> Undo:
    """kill -9 of Redis, which is back when the fault is undone."""
    assert setup.redis is not None, "a cluster has one"
    setup.redis.kill()
    return setup.redis.start


def stop_worker(setup: Setup, rng: Random) -> Undo:
    """SIGSTOP of a process that computes, SIGCONT later: what it then goes on to write may be late."""
    server = rng.choice(setup.computing)
    server.send(signal.SIGSTOP)
    return lambda: server.send(signal.SIGCONT)


def stop_gateway(setup: Setup, rng: Random) -> Undo:
    """SIGSTOP of a process that takes requests, SIGCONT later."""
    server = rng.choice(setup.gateways)
    server.send(signal.SIGSTOP)
    return lambda: server.send(signal.SIGCONT)


def fill_disk(setup: Setup, rng: Random) -> Undo:
    """The disk becomes full, with room for little or nothing."""
    ids = setup.ids
    setup.disk.fill(rng.choice((0, 4096, rng.randrange(1 << 20))), ids)
    return lambda: setup.disk.free(ids)


def kill_on_full_disk(setup: Setup, rng: Random) -> None:
    """The disk becomes full; a while later a process that computes is killed, and there is room again."""
    undo = fill_disk(setup, rng)
    time.sleep(rng.uniform(0.2, 2))
    server = rng.choice(setup.computing)
    server.kill()
    undo()
    server.start()


def flip_in_payload(setup: Setup, rng: Random) -> None:
    """A bit of a page in a file turns, under a process that runs."""
    if flip_in_files(rng.choice(setup.pages), "payload", rng) is None:
        raise NothingToHitError


def flip_in_header(setup: Setup, rng: Random) -> None:
    """A bit of a record's header in a segment file turns, under a process that runs."""
    if flip_in_files(rng.choice(setup.pages), "header", rng) is None:
        raise NothingToHitError


def flip_while_down(setup: Setup, rng: Random) -> None:
    """A process that computes is killed, and bits turn in its files before it starts again."""
    server = rng.choice(setup.computing)
    server.kill()
    folder = setup.pages[setup.computing.index(server)]
    hit = [
        flip_in_files(folder, rng.choice(("header", "payload")), rng)
        for _ in range(rng.randrange(1, 4))
    ]
    server.start()
    if not any(hit):
        raise NothingToHitError


def lose_files(setup: Setup, rng: Random) -> None:
    """A process that computes is killed, and all its segment files are gone when it starts again."""
    server = rng.choice(setup.computing)
    server.kill()
    for segment in setup.pages[setup.computing.index(server)].glob("segment-*.kv"):
        segment.unlink()
    server.start()


def flip_in_redis_page(setup: Setup, rng: Random) -> None:
    """A bit of a page in Redis turns."""
    assert setup.redis is not None, "a cluster has one"
    try:
        with setup.redis.client() as client:
            flipped = flip_in_redis(client, rng)
    except redis.ConnectionError as error:  # an earlier fault has it down still
        raise NothingToHitError from error
    if flipped is None:
        raise NothingToHitError


def jump_clock(setup: Setup, rng: Random) -> None:
    """A process's wall clock jumps by hours, forward or back, and stays so."""
    clock.set_offset(
        rng.choice(setup.servers).clock, rng.choice((-1, 1)) * rng.uniform(0.01, 30) * HOUR
    )


def cut_to_worker(setup: Setup, rng: Random) -> None:
    """The connections between gateways and a worker break."""
    rng.choice(setup.to_workers).cut()


def cut_to_redis(setup: Setup, rng: Random) -> None:
    """The connections between a process and Redis break."""
    rng.choice(setup.to_redis).cut()


def hinder_worker(setup: Setup, rng: Random) -> Undo:
    """The way to a worker is slow, silent or closed for a while."""
    return _hinder(rng.choice(setup.to_workers), rng)


def hinder_redis(setup: Setup, rng: Random) -> Undo:
    """The way to Redis is slow, silent or closed for a process, for a while."""
    return _hinder(rng.choice(setup.to_redis), rng)


def _hinder(proxy: Proxy, rng: Random) -> Undo:
    way = rng.choice(("slow", "silent", "closed"))
    if way == "slow":
        proxy.slow(rng.uniform(0.01, 0.5))
    elif way == "silent":
        proxy.hold()
    else:
        proxy.refuse()
    return proxy.heal


KINDS: Mapping[str, Do] = {
    "kill -9, worker": kill_worker,
    "kill -9, worker, again while it starts": kill_worker_twice,
    "kill -9, gateway": kill_gateway,
    "kill -9, Redis": kill_redis,
    "kill -9, all": kill_all,
    "SIGSTOP, worker": stop_worker,
    "SIGSTOP, gateway": stop_gateway,
    "connections cut, gateway to worker": cut_to_worker,
    "connections cut, to Redis": cut_to_redis,
    "connection slow, silent or closed, gateway to worker": hinder_worker,
    "connection slow, silent or closed, to Redis": hinder_redis,
    "disk full": fill_disk,
    "disk full, then kill -9": kill_on_full_disk,
    "bit flipped in a page": flip_in_payload,
    "bit flipped in a segment header": flip_in_header,
    "bits flipped while killed": flip_while_down,
    "all files lost while killed": lose_files,
    "bit flipped in Redis": flip_in_redis_page,
    "clock jumps": jump_clock,
}
"""What happens, by its name in the result. `kvrecall serve` is its own worker and gateway."""

LATE = (
    "SIGSTOP, worker",
    "SIGSTOP, gateway",
    "kill -9, Redis",
    "connection slow, silent or closed, to Redis",
)
"""What is often undone late, when the session's claim has run out and it went on elsewhere."""

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
"""How often each happens to one process, relative to the others."""

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
"""How often each happens to a cluster."""
