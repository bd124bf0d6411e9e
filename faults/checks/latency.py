"""Bounds on latency: health checks always, requests while a part is silent.

The time that a process's threads waited for a CPU is not the service's fault and is subtracted:
rounds share the machine. What remains is time that it waited for a lock, a disk or another part.
"""

import json
import subprocess
import sys
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from faults.load.counters import Attempt
from faults.rig.setups import Setup

# A process that has its signals and its listening socket answers within this, whatever is broken.
HEALTH_SECONDS = 1.0
# KVRECALL_SERVICE__QUEUE_SECONDS: no request waits longer for a session, a slot or another part.
REQUEST_SECONDS = 30.0


@dataclass(frozen=True)
class Sample:
    """One health check: process, monotonic time, duration, and wait for a CPU, in seconds.

    `waited` is the process's wait for a CPU since its start.
    """

    name: str
    start: float
    seconds: float
    answered: bool
    queued: float
    waited: float


class Prober:
    """Asks for the health of all processes of a set-up while faults happen."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._out = setup.folder / "health.jsonl"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start to ask."""
        targets = {
            server.name: {
                "port": server.port,
                "grpc": server.command == "worker",
                "pid": str(server.pid_file),
            }
            for server in self._setup.servers
        }
        command = [sys.executable, "-m", "faults.checks.prober"]
        self._process = subprocess.Popen(
            [*command, json.dumps(targets), str(self._out)], stdin=subprocess.PIPE
        )

    def stop(self) -> None:
        """Ask no more."""
        if self._process is not None:
            self._process.communicate()
            self._process = None

    def samples(self) -> list[Sample]:
        """All health checks that were answered or failed."""
        return read_samples(self._out)


def read_samples(file: Path) -> list[Sample]:
    """Health checks of a prober's file."""
    if not file.exists():
        return []
    lines = file.read_text(encoding="utf-8").splitlines()
    return [Sample(*json.loads(line)) for line in lines if line.endswith("]")]


def slow_health_checks(setup: Setup, samples: Sequence[Sample]) -> list[str]:
    """Health checks of undisturbed processes that took longer than HEALTH_SECONDS."""
    servers = {server.name: server for server in setup.servers}
    return [
        f"{each.name}: {each.seconds:.1f} s, {each.queued:.1f} s of them without a CPU"
        for each in samples
        if each.seconds - each.queued > HEALTH_SECONDS
        and servers[each.name].undisturbed(each.start, each.start + each.seconds)
    ]


def slow_requests(
    setup: Setup, samples: Sequence[Sample], attempts: Sequence[Attempt]
) -> Iterator[str]:
    """Requests to undisturbed gateways that took longer than REQUEST_SECONDS."""
    gateways = dict(zip(setup.urls, setup.gateways, strict=True))
    timelines: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        timelines[sample.name].append(sample)
    for each in attempts:
        end = each.start + each.seconds
        if each.seconds <= REQUEST_SECONDS or not gateways[each.url].undisturbed(each.start, end):
            continue
        queued = max((_queued(line, each.start, end) for line in timelines.values()), default=0.0)
        if each.seconds - queued > REQUEST_SECONDS:
            yield f"{each.outcome} after {each.seconds:.1f} s, {queued:.1f} s of them without a CPU"


def _queued(timeline: Sequence[Sample], start: float, end: float) -> float:
    """Seconds that a process waited for a CPU between two moments, over its restarts."""
    times = [sample.start for sample in timeline]
    waits = [
        sample.waited
        for sample in timeline[bisect_left(times, start) : bisect_left(times, end) + 1]
    ]
    return sum(max(0.0, later - earlier) for earlier, later in pairwise(waits))
