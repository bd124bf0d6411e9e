"""Costs of gateways, catalogs and row stores at 1,000, 10,000 and 100,000 sessions.

`python -m benchmarks.scale` fills each store (SQLite, one Redis, a cluster of six) through the
catalog's own writes and measures every operation at each size, with four gateways in this process
(one over SQLite) and 50 simulated workers: real gRPC servers that register in Redis and whose rows
are scripted, so that what is left is the service's own cost. `rows` and `rows-redis` do the same
with the row store over files and Redis, in pages of 704 bytes; `start` opens a store of 3 million
such pages. Results go to `benchmarks/results/scale.json`, a section at a time: sections that are
not run are kept.
"""

import argparse
import asyncio
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import structlog

from benchmarks.scale import backends
from benchmarks.scale.backends import Backend
from benchmarks.scale.gateways import Plan, gateways
from benchmarks.scale.rows import StoredRows, measure_start
from benchmarks.scale.workers import simulated_workers
from kvrecall.reporting.results import Row, build_results, read_results

RESULT = Path(__file__).parents[1] / "results" / "scale.json"
BACKENDS: dict[str, Callable[[Path], AbstractContextManager[Backend]]] = {
    "sqlite": backends.sqlite,
    "redis": backends.one_redis,
    "cluster": backends.cluster,
}
STORES = (*BACKENDS, "rows", "rows-redis", "start")


async def measure(backend: Backend, plan: Plan, sizes: Sequence[int]) -> list[Row]:
    """Measure a store at each size, in ascending order."""
    rows = list[Row]()
    with simulated_workers(plan.workers, backend.url, plan.namespace, plan.state_bytes) as found:
        async with gateways(backend, plan, found) as fleet:
            for size in sorted(sizes):
                await fleet.fill(size)
                await asyncio.to_thread(backend.settle)
                rows += report(await fleet.measure(), size)
    return rows


def measure_gateways(name: str, folder: Path, plan: Plan, sizes: Sequence[int]) -> list[Row]:
    """Measure gateways over the named catalog store."""
    with BACKENDS[name](folder) as backend:
        return asyncio.run(measure(backend, plan, sizes))


def measure_rows(name: str, folder: Path, plan: Plan, sizes: Sequence[int]) -> list[Row]:
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


def main() -> None:
    """Run the measurement that the command line describes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stores", nargs="*", choices=STORES, default=STORES)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--gateways", type=int, default=4)
    parser.add_argument("--workers", type=int, default=50)
    parser.add_argument("--repetitions", type=int, default=100)
    parser.add_argument("--state-bytes", type=int, default=4096)
    parser.add_argument("--pages", type=int, default=3_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    plan = Plan(
        options.seed,
        options.gateways,
        options.workers,
        options.repetitions,
        options.state_bytes,
    )
    rows = list[Row]()
    for name in options.stores:
        folder = Path(tempfile.mkdtemp(prefix="kvrecall-scale-"))
        try:
            if name == "start":
                row = measure_start(folder, options.pages)
                rows += report([row], row["sessions"])
            else:
                measure_store = measure_gateways if name in BACKENDS else measure_rows
                rows += measure_store(name, folder / name, plan, options.sizes)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    kept = kept_rows(options.out, rows)
    build_results("scale", options.seed, "none", [*kept, *add_ratios(rows)]).write(options.out)


if __name__ == "__main__":
    main()
