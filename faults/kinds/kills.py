"""Processes that are killed, stopped, restarted, or that lose power."""

import signal
import time
from random import Random

from faults.kinds.base import NothingToHitError, Undo
from faults.rig import clock
from faults.rig.setups import Setup
from kvrecall.domain.settings.session import ONE_SHOT_SECONDS


def kill_worker(setup: Setup, rng: Random) -> None:
    """Kill -9 of a worker, restarted within a second; of several ranks, of one or of their launcher."""
    server = rng.choice(setup.workers)
    server.kill_one(rng)
    time.sleep(rng.uniform(0, 1))
    server.start()


def kill_worker_twice(setup: Setup, rng: Random) -> None:
    """Kill -9 of a worker, and again while it starts."""
    server = rng.choice(setup.workers)
    server.kill_one(rng)
    server.start_and_kill(rng.uniform(1, 8))
    server.start()


def kill_gateway(setup: Setup, rng: Random) -> None:
    """Kill -9 of a gateway, restarted at once."""
    server = rng.choice(setup.gateways)
    server.kill()
    server.start()


def kill_all(setup: Setup, rng: Random) -> None:
    """Kill -9 of everything at once; all of it is restarted."""
    setup.kill()
    setup.start()


def lose_power(setup: Setup, rng: Random) -> None:
    """A loss of power: only what was synced survives, and a random part of what was not."""
    if not setup.drives:
        raise NothingToHitError
    setup.kill()
    setup.disk.free(())
    for drive in setup.drives:
        drive.cut(rng)
    setup.start()


def lose_power_of_one(setup: Setup, rng: Random) -> None:
    """A loss of power of one process's machine."""
    server = rng.choice(setup.servers)
    if server.drive is None:
        raise NothingToHitError
    server.kill()
    setup.disk.free(setup.ids)
    server.drive.cut(rng)
    server.start()


def kill_redis(setup: Setup, rng: Random) -> Undo:
    """Kill -9 of Redis, which is restarted when the fault is undone."""
    assert setup.redis is not None, "a cluster has one"
    setup.redis.kill()
    return setup.redis.start


def stop_worker(setup: Setup, rng: Random) -> Undo:
    """SIGSTOP of a worker, or of a rank, SIGCONT later: the writes that it then resumes may be late."""
    server = rng.choice(setup.workers)
    server.send(signal.SIGSTOP, server.choose_process(rng))
    return lambda: server.send(signal.SIGCONT)


def stop_gateway(setup: Setup, rng: Random) -> Undo:
    """SIGSTOP of a gateway, SIGCONT later."""
    server = rng.choice(setup.gateways)
    server.send(signal.SIGSTOP, server.choose_process(rng))
    return lambda: server.send(signal.SIGCONT)


def stop_redis(setup: Setup, rng: Random) -> Undo:
    """SIGSTOP of Redis: connections stay open, and nothing answers."""
    redis = setup.redis
    assert redis is not None, "a cluster has one"
    redis.send(signal.SIGSTOP)
    return lambda: redis.send(signal.SIGCONT)


def drain_worker(setup: Setup, rng: Random) -> None:
    """SIGTERM of a worker, which drains, and its restart."""
    server = rng.choice(setup.workers)
    _end_well(setup, server.stop(), server.name)
    server.start()


def restart_one_by_one(setup: Setup, rng: Random) -> None:
    """A rolling restart: each process in turn ends by SIGTERM and is started again."""
    for server in rng.sample(setup.servers, len(setup.servers)):
        _end_well(setup, server.stop(), server.name)
        server.start()


def _end_well(setup: Setup, code: int, name: str) -> None:
    if code not in (0, -signal.SIGKILL):  # an earlier fault may have killed it
        setup.bad_exits.append(f"{name} ended with {code}")


def jump_clock(setup: Setup, rng: Random) -> None:
    """A jump of a process's wall clock by minutes, forward or back, for good.

    Two jumps and a round together are shorter than the hour after which a stateless request's session ends: one
    that is built again renders its text, whose tokens may be others than those that were generated.
    """
    seconds = rng.uniform(0.01, 0.35) * ONE_SHOT_SECONDS
    clock.set_offset(rng.choice(setup.servers).clock, rng.choice((-1, 1)) * seconds)
