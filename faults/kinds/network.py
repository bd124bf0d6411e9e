"""Connections that are cut, slow, silent, one-way or refused; partitions of every pair."""

import time
from random import Random

from faults.kinds.base import NothingToHitError, Undo
from faults.rig.proxy import WAYS, Proxy, Way
from faults.rig.setups import Setup


def cut_to_worker(setup: Setup, rng: Random) -> None:
    """Broken connections between gateways and a worker."""
    rng.choice(setup.to_workers).cut()


def cut_to_redis(setup: Setup, rng: Random) -> None:
    """Broken connections between a process and Redis."""
    rng.choice(setup.to_redis).cut()


def degrade_worker_link(setup: Setup, rng: Random) -> Undo:
    """A slow or refused connection of gateways to a worker, for a while."""
    return _degrade(rng.choice(setup.to_workers), rng)


def degrade_redis_link(setup: Setup, rng: Random) -> Undo:
    """A slow or refused connection of a process to Redis, for a while."""
    return _degrade(rng.choice(setup.to_redis), rng)


def part_gateways_from_worker(setup: Setup, rng: Random) -> Undo:
    """A partition between the gateways and a worker: nothing arrives, no connection closes."""
    return _silence(rng.choice(setup.to_workers))


def part_one_way(setup: Setup, rng: Random) -> Undo:
    """A connection to a worker on which requests arrive and no answers, or the other way round."""
    return _silence(rng.choice(setup.to_workers), rng)


def part_one_gateway_from_worker(setup: Setup, rng: Random) -> Undo:
    """A partition between one gateway and a worker, which the others reach."""
    return _part_pair(setup, rng)


def part_one_gateway_one_way(setup: Setup, rng: Random) -> Undo:
    """As `part_one_gateway_from_worker`, of requests or of answers alone."""
    return _part_pair(setup, rng, rng.choice(WAYS))


def part_worker_from_redis(setup: Setup, rng: Random) -> Undo:
    """A partition between a worker and Redis."""
    heal = _silence(rng.choice(_links_to_redis(setup, "worker")))
    begun = time.time()

    def undo() -> None:
        heal()
        setup.cut_off.append((begun, time.time()))

    return undo


def part_gateway_from_redis(setup: Setup, rng: Random) -> Undo:
    """A partition between a gateway and Redis."""
    return _silence(rng.choice(_links_to_redis(setup, "gateway")))


def part_from_redis_one_way(setup: Setup, rng: Random) -> Undo:
    """A process whose commands reach Redis while no answer comes back, or the other way round."""
    return _silence(rng.choice(setup.to_redis), rng)


def _links_to_redis(setup: Setup, command: str) -> list[Proxy]:
    """Proxies to Redis of all processes of one command; they are in the order of the processes."""
    links = zip(setup.servers, setup.to_redis, strict=False)
    found = [proxy for server, proxy in links if server.command == command]
    if not found:
        raise NothingToHitError
    return found


def _part_pair(setup: Setup, rng: Random, *ways: Way) -> Undo:
    if len(setup.gateways) == 1 or not setup.to_workers:
        raise NothingToHitError
    link = rng.choice(setup.to_workers)
    link.part(rng.choice(setup.gateways).local_ports, *ways)
    return link.heal


def _silence(proxy: Proxy, rng: Random | None = None) -> Undo:
    proxy.stall(*(() if rng is None else (rng.choice(WAYS),)))

    def heal() -> None:
        # As in a network that was down: some connections have timed out meanwhile.
        proxy.heal()
        if rng is None:
            proxy.cut()

    return heal


def _degrade(proxy: Proxy, rng: Random) -> Undo:
    if rng.random() < 0.5:
        proxy.delay(rng.uniform(0.01, 0.5))
    else:
        proxy.refuse()
    return proxy.heal
