"""Costs of gateways, catalogs and row stores at 1,000, 10,000 and 100,000 sessions.

`python -m benchmarks scale` fills each store (SQLite, one Redis, a cluster of six) through the
catalog's own writes and measures every operation at each size, with four gateways in this process
(one over SQLite) and 50 simulated workers: real gRPC servers that register in Redis and whose rows
are scripted, so that what is left is the service's own cost. `rows` and `rows-redis` do the same
with the row store over files and Redis, in pages of 704 bytes; `start` opens a store of 3 million
such pages. Results go to `benchmarks/results/scale.json`, a section at a time: sections that are
not run are kept.
"""

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path

import structlog

from benchmarks.benchmark import Benchmark, Measured
from benchmarks.options import option
from benchmarks.scale import backends
from benchmarks.scale.backends import Backend
from benchmarks.scale.gateways import Sizes, gateways
from benchmarks.scale.rows import StoredRows, measure_start
from benchmarks.scale.workers import simulated_workers
from kvrecall_server.reporting.results import Row, read_results

BACKENDS: dict[str, Callable[[Path], AbstractContextManager[Backend]]] = {
    "sqlite": backends.sqlite,
    "redis": backends.one_redis,
    "cluster": backends.cluster,
}
STORES = (*BACKENDS, "rows", "rows-redis", "start")


async def measure_backend(backend: Backend, plan: Sizes, sizes: Sequence[int]) -> list[Row]:
    """Measure a store at each size, in ascending order."""
    rows = list[Row]()
    with simulated_workers(plan.workers, backend.url, plan.namespace, plan.state_bytes) as found:
        async with gateways(backend, plan, found) as fleet:
            for size in sorted(sizes):
                await fleet.fill(size)
                await asyncio.to_thread(backend.settle)
                rows += report(await fleet.measure(), size)
    return rows


def measure_gateways(name: str, folder: Path, plan: Sizes, sizes: Sequence[int]) -> list[Row]:
    """Measure gateways over the named catalog store."""
    with BACKENDS[name](folder) as backend:
        return asyncio.run(measure_backend(backend, plan, sizes))


def measure_rows(name: str, folder: Path, plan: Sizes, sizes: Sequence[int]) -> list[Row]:
    """Measure the row store, with Redis below the files if the name says so."""
    with ExitStack() as stack:
        url = None
        if name == "rows-redis":
            url = stack.enter_context(backends.one_redis(folder / "redis")).url
        stored = StoredRows(folder / "files", url, plan.seed, plan.repetitions)
        stack.callback(stored.close)
        rows = list[Row]()
        for size in sorted(sizes):
            stored.fill(size)
            rows += report(stored.measure(), size)
        return rows


def report(rows: Sequence[Row], size: int) -> list[Row]:
    """Print rows and return them."""
    for row in rows:
        print(f"{size:7} {row['condition']:48} {row['metric']:34} {row['median']:.6g}", flush=True)
    return list(rows)


def add_ratios(rows: Sequence[Row]) -> list[Row]:
    """Add to each row its ratio to the same condition at the smallest size, if that is positive."""
    first: dict[tuple[str, str], Row] = {}
    for row in rows:
        first.setdefault((row["condition"], row["metric"]), row)
    compared = list[Row]()
    for row in rows:
        base = first[row["condition"], row["metric"]]
        if base["median"] > 0:
            ratio = round(row["median"] / base["median"], 3)
            row = {**row, "ratio_to": f"{base['sessions']} sessions", "ratio": ratio}
        compared.append(row)
    return compared


def kept_rows(path: Path, measured: Sequence[Row]) -> list[Row]:
    """Return the rows of an earlier run for stores that were not measured in this one."""
    if not path.exists():
        return []
    names = {row["condition"].partition(":")[0] for row in measured}
    return [
        row for row in read_results(path).results if row["condition"].partition(":")[0] not in names
    ]


@dataclass(frozen=True)
class Plan:
    """Sizes of a measurement."""

    stores: tuple[str, ...] = option(STORES, choices=STORES)
    sizes: tuple[int, ...] = option((1_000, 10_000, 100_000), "numbers of sessions")
    gateways: int = 4
    workers: int = 50
    repetitions: int = option(100, "of each operation")
    state_bytes: int = option(4096, "of a session's worker state")
    pages: int = option(3_000_000, "of the store that is started")
    seed: int = 0


def measure(plan: Plan) -> Measured:
    """Measure each store of the plan."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    rows = [row for name in plan.stores for row in measure_store(name, plan)]
    return Measured("scale.json", "none", add_ratios(rows), plan.seed)


def measure_store(name: str, plan: Plan) -> list[Row]:
    """Measure one store in a folder of its own."""
    sizes = Sizes(plan.seed, plan.gateways, plan.workers, plan.repetitions, plan.state_bytes)
    folder = Path(tempfile.mkdtemp(prefix="kvrecall-scale-"))
    try:
        if name == "start":
            row = measure_start(folder, plan.pages)
            return report([row], row["sessions"])
        measure_sizes = measure_gateways if name in BACKENDS else measure_rows
        return measure_sizes(name, folder / name, sizes, plan.sizes)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def merge(out: Path, rows: Sequence[Row]) -> list[Row]:
    """Keep sections of the file that were not measured."""
    return [*kept_rows(out, rows), *rows]


BENCHMARK = Benchmark(
    "scale", "costs of catalogs and row stores by sessions", Plan, measure, merge=merge
)
