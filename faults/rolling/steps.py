"""Steps of the drill: what is done to which process, and how it is known that it serves again."""

import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import httpx

from faults.rig.processes import ServerProcess
from faults.rig.redis_process import RedisProcess
from faults.rig.setups import Setup
from kvrecall.client import KvrecallClient, KvrecallError

KINDS = ("kill", "stop", "drain", "restart", "upgrade")
PROBE_TIMEOUT_SECONDS = 5.0


@dataclass(frozen=True)
class Step:
    """One action on one process.

    Attributes:
        kind: One of KINDS.
        done: What is done, in words.
        process: Its name.
        act: Does it, and starts the process again.
        serves: True once it serves again.
    """

    kind: str
    done: str
    process: str
    act: Callable[[], None]
    serves: Callable[[], bool]

    @property
    def name(self) -> str:
        """Action and process."""
        return f"{self.done}: {self.process}"


def build_steps(setup: Setup, stopped_seconds: float) -> list[Step]:
    """Build all steps of the drill on a cluster, the rolling upgrade last.

    A process that is stopped goes on `stopped_seconds` later.
    """
    return [
        *_build_kills(setup),
        *_build_stops(setup, stopped_seconds),
        *(_end_well("drain", "SIGTERM, start", setup, each) for each in _get_first(setup)),
        _restart_redis(setup),
        *(_end_well("upgrade", "rolling upgrade", setup, each) for each in setup.servers),
    ]


def _get_first(setup: Setup) -> tuple[ServerProcess, ServerProcess]:
    return setup.workers[0], setup.gateways[0]


def _build_kills(setup: Setup) -> Iterator[Step]:
    done = "kill -9, start"
    redis = _get_redis(setup)
    for each in _get_first(setup):
        yield Step(
            "kill", done, each.name, partial(_restart, each.kill, each.start), _serves(setup, each)
        )
    yield Step(
        "kill",
        done,
        "redis",
        partial(_restart, redis.kill, redis.start),
        partial(_all_ready, setup),
    )


def _build_stops(setup: Setup, seconds: float) -> Iterator[Step]:
    done = f"SIGSTOP for {seconds:g} s"
    for each in (setup.workers[1], setup.gateways[1]):
        yield Step(
            "stop", done, each.name, partial(_pause, each.send, seconds), _serves(setup, each)
        )
    redis = _get_redis(setup)
    yield Step(
        "stop", done, "redis", partial(_pause, redis.send, seconds), partial(_all_ready, setup)
    )


def _end_well(kind: str, done: str, setup: Setup, server: ServerProcess) -> Step:
    """A process that drains, ends and is started again."""

    def stop() -> None:
        if (code := server.stop()) != 0:
            setup.bad_exits.append(f"{server.name} ended with {code}")

    act = partial(_restart, stop, server.start)
    return Step(kind, done, server.name, act, _serves(setup, server))


def _restart_redis(setup: Setup) -> Step:
    redis = _get_redis(setup)
    act = partial(_restart, redis.stop, redis.start)
    return Step("restart", "SIGTERM, start", "redis", act, partial(_all_ready, setup))


def _get_redis(setup: Setup) -> RedisProcess:
    assert setup.redis is not None, "a cluster has one"
    return setup.redis


def _restart(end: Callable[[], None], start: Callable[[], None]) -> None:
    end()
    start()


def _pause(send: Callable[[signal.Signals], None], seconds: float) -> None:
    send(signal.SIGSTOP)
    time.sleep(seconds)
    send(signal.SIGCONT)


def _serves(setup: Setup, server: ServerProcess) -> Callable[[], bool]:
    """Build the condition that a gateway is ready, or that all gateways give sessions to a worker."""
    if server in setup.workers:
        return partial(_is_known, setup, server)
    return partial(_is_ready, setup.urls[setup.gateways.index(server)])


def _all_ready(setup: Setup) -> bool:
    return all(_is_ready(url) for url in setup.urls)


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=PROBE_TIMEOUT_SECONDS).is_success
    except httpx.TransportError:
        return False


def _is_known(setup: Setup, worker: ServerProcess) -> bool:
    operations = setup.operations[setup.workers.index(worker)]
    return _is_ready(operations) and all(_knows(url, worker.name) for url in setup.urls)


def _knows(url: str, name: str) -> bool:
    try:
        with KvrecallClient(url, PROBE_TIMEOUT_SECONDS) as client:
            return any(load.name == name and not load.draining for load in client.workers())
    except KvrecallError:
        return False
