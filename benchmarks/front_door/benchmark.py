"""The front door's own cost: reads of a session, a turn's overhead, and slow or broken clients.

`python -m benchmarks front-door` serves a bare FastAPI echo of the same size, the gateway over
SQLite and the gateway over a real Redis (both over a worker that computes nothing), and
`kvrecall serve` with the packaged model, each in a process of its own, and measures them in turns,
so that disturbances of the machine affect all alike:

- requests per second of `GET /v1/sessions/{id}` over 1, 8 and 64 connections, each with a session
  of its own, as a share of the echo's;
- seconds of a turn that only appends, beyond the worker's own compute (prefill, decode, eviction)
  and one fsync of the same disk, which is measured after each turn; and beyond the flush of the
  turn's rows as well, which waits for the row store's threads and for an fsync of its own;
- the 95th percentile of reads beside 100 slow or broken connections, as a share of that without,
  and the memory that 100 unfinished bodies of 4 MiB add.

The result file goes to `benchmarks/results/`.
"""

import asyncio
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from uuid import uuid4

import httpx
import numpy as np
import psutil

from benchmarks.benchmark import Benchmark, Measured
from benchmarks.front_door.load import (
    SLOW_OR_BROKEN,
    Caller,
    misbehaving,
    request_for,
    send_almost_all,
)
from benchmarks.options import option
from faults.rig.processes import QUIET
from faults.rig.redis_process import RedisProcess, running
from kvrecall_server.app.local.server import PROGRAM, launch
from kvrecall_server.app.models import REFERENCE
from kvrecall_server.reporting.results import Row, speed_row
from reference import MODEL_PATH

ECHO = "bare FastAPI echo"
CONNECTIONS = (1, 8, 64)
BAD_CONNECTIONS = 100
READERS = 4
SETTLE_SECONDS = 3.0
WARM_TURNS = 5
TURN_METRICS = (
    "turn",
    "its worker's compute",
    "its worker's flush",
    "one fsync",
    "turn beyond compute and one fsync",
    "turn beyond compute, flush and one fsync",
)
# Twelve tokens of the packaged model, with those that its template adds.
MESSAGE = {"role": "user", "content": "The code is K7777."}


@dataclass(frozen=True)
class Plan:
    """Sizes of a measurement; `seconds` is the length of one window of requests."""

    seed: int = 0
    seconds: float = option(4.0, "of one window of requests")
    rounds: int = option(7, "windows of each subject")
    turns: int = option(200, "of each subject")


@dataclass(frozen=True)
class Subject:
    """A serving process, and the paths that are read from it, one per connection."""

    name: str
    url: str
    pid: int
    paths: Sequence[str]


def measure(plan: Plan) -> Measured:
    """Measure reads, turns and bad connections."""
    model = f"the reference model ({MODEL_PATH.name}) for turns of kvrecall serve"
    return Measured("front_door.json", model, asyncio.run(measure_all(plan)), plan.seed)


async def measure_all(plan: Plan) -> list[Row]:
    """Rows of reads, of turns and of bad connections."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        here = Path(folder)
        echo = stack.enter_context(served(ECHO, "echo", here))
        sqlite, over_redis = stack.enter_context(served_gateways(here, "gateway on "))
        whole = stack.enter_context(served("kvrecall serve", "serve", here))
        rows = await read_rows([echo, sqlite, over_redis], plan)
        rows += await turn_rows([sqlite, over_redis, whole], here, plan)
        rows += await slow_rows(sqlite, plan)
        return [*rows, await memory_row(sqlite)]


@contextmanager
def served_gateways(folder: Path, prefix: str = "") -> Iterator[list[Subject]]:
    """Gateways over a stub worker: one on SQLite, one on a Redis server of its own."""
    with running(RedisProcess(folder / "redis")) as redis, ExitStack() as stack:
        shared = {
            "KVRECALL_CATALOG_URL": redis.url,
            "KVRECALL_STORE__REDIS_NAMESPACE": uuid4().hex,
        }
        yield [
            stack.enter_context(served(f"{prefix}SQLite", "stub", folder)),
            stack.enter_context(served(f"{prefix}Redis", "stub", folder, shared)),
        ]


@contextmanager
def served(
    name: str, command: str, folder: Path, environment: Mapping[str, str] | None = None
) -> Iterator[Subject]:
    """A subject in a process of its own, with its data in `folder`."""
    own = PROGRAM if command == "serve" else ("-m", "benchmarks.front_door.servers")
    data = folder / name.replace(" ", "-")
    settings = {
        "KVRECALL_DATA": str(data),
        "KVRECALL_MODEL": REFERENCE,
        "KVRECALL_PORT": "0",
        "KVRECALL_LOG": "json",
    }
    process, url = launch(
        [],
        folder / f"{data.name}.log",
        command,
        program=own,
        environment={**os.environ, **QUIET, **settings, **(environment or {})},
    )
    with process:
        try:
            yield Subject(name, url, process.pid, create_sessions(url, command))
        finally:
            process.terminate()


def create_sessions(url: str, command: str) -> list[str]:
    """Paths of as many sessions as there are connections at most."""
    if command == "echo":
        return [f"/v1/sessions/s_{number:024x}" for number in range(max(CONNECTIONS))]
    with httpx.Client(base_url=url, timeout=60) as http:
        bodies = [{"seed": number} for number in range(max(CONNECTIONS))]
        created = [http.post("/v1/sessions", json=body).raise_for_status() for body in bodies]
    return [f"/v1/sessions/{each.json()['id']}" for each in created]


async def read_rows(subjects: Sequence[Subject], plan: Plan) -> list[Row]:
    """Rows of reads: requests per second, in rotation."""
    rows: list[Row] = []
    for connections in CONNECTIONS:
        rates: dict[str, list[float]] = {subject.name: [] for subject in subjects}
        for _ in range(plan.rounds):
            for subject in subjects:
                paths = subject.paths[:connections]
                rate, _ = await request_for(subject.url, paths, plan.seconds)
                rates[subject.name].append(rate)
        condition = f"{connections} connections"
        rows += paired_rows(condition, "reads", "requests per second", rates, ECHO)
    return rows


def paired_rows(
    condition: str, metric: str, unit: str, values: Mapping[str, Sequence[float]], base: str
) -> list[Row]:
    """One row per subject; a ratio is the median of those within each round."""
    rows = []
    for name, found in values.items():
        pairs = zip(found, values[base], strict=True)
        ratio = {
            "ratio_to": base,
            "ratio": round(median(ours / theirs for ours, theirs in pairs), 3),
        }
        shown = {} if name == base else ratio
        rows.append(speed_row(f"{condition}: {name}", metric, unit, found, **shown))
    return rows


async def turn_rows(subjects: Sequence[Subject], folder: Path, plan: Plan) -> list[Row]:
    """Rows of turns that append: seconds in all, of each part, and beyond these.

    A flush contains the hand-over to the threads of the row store, and an fsync of its own.
    """
    times: dict[str, list[tuple[float, ...]]] = {each.name: [] for each in subjects}
    with ExitStack() as stack:
        clients = {each.name: stack.enter_context(closing(Caller(each.url))) for each in subjects}
        synced = stack.enter_context((folder / "synced").open("wb"))
        for number in range(WARM_TURNS + plan.turns):
            for each in subjects:
                wall, compute, flush = send_turn(clients[each.name], each)
                sync = time_fsync(synced.fileno())
                rest = wall - compute - sync
                if number >= WARM_TURNS:
                    times[each.name].append((wall, compute, flush, sync, rest, rest - flush))
    rows = []
    for name, found in times.items():
        columns = list(zip(*found, strict=True))
        for metric, values in zip(TURN_METRICS, columns, strict=True):
            rows.append(speed_row(f"a turn that appends: {name}", metric, "seconds", values))
    return rows


def send_turn(caller: Caller, subject: Subject) -> tuple[float, float, float]:
    """Append a message; return the seconds of the request, of its worker's compute and flush.

    The stub does neither: its seconds are made up.
    """
    body = json.dumps({"messages": [MESSAGE], "generate": False}).encode()
    wall, answer = caller.post(f"{subject.paths[0]}/turns", body)
    seconds = json.loads(answer)["seconds"] if subject.name == "kvrecall serve" else {}
    compute = sum(seconds.get(phase, 0.0) for phase in ("prefill", "decode", "evict"))
    return wall, compute, seconds.get("flush", 0.0)


def time_fsync(file: int) -> float:
    """Seconds of appending 4 KiB to a file and syncing it."""
    started = time.perf_counter()
    os.write(file, b"\0" * 4096)
    os.fsync(file)
    return time.perf_counter() - started


async def slow_rows(subject: Subject, plan: Plan) -> list[Row]:
    """Rows of reads alone and beside slow or broken connections, in rotation."""
    alone, beside = "alone", f"beside {BAD_CONNECTIONS} slow or broken connections"
    p95: dict[str, list[float]] = {alone: [], beside: []}
    paths = subject.paths[:READERS]
    for _ in range(plan.rounds):
        _, latencies = await request_for(subject.url, paths, plan.seconds)
        p95[alone].append(float(np.percentile(latencies, 95)))
        async with misbehaving(subject.url, BAD_CONNECTIONS, SLOW_OR_BROKEN):
            await asyncio.sleep(SETTLE_SECONDS)
            _, latencies = await request_for(subject.url, paths, plan.seconds)
            p95[beside].append(float(np.percentile(latencies, 95)))
        await asyncio.sleep(SETTLE_SECONDS)
    return paired_rows(f"{READERS} readers", "p95 of a read", "seconds", p95, alone)


async def memory_row(subject: Subject) -> Row:
    """Row of the memory that unfinished bodies of 4 MiB add, at its peak."""
    process = psutil.Process(subject.pid)
    before = process.memory_info().rss
    added = []
    async with misbehaving(subject.url, BAD_CONNECTIONS, [send_almost_all]):
        last = time.monotonic() + 2 * SETTLE_SECONDS
        while time.monotonic() < last:
            await asyncio.sleep(0.1)
            added.append(float(process.memory_info().rss - before))
    return speed_row(
        f"{BAD_CONNECTIONS} unfinished bodies of 4 MiB",
        "memory",
        "bytes added at most",
        [max(added)],
    )


BENCHMARK = Benchmark(
    "front_door", "reads, turns and bad connections of the HTTP API", Plan, measure
)
