"""`python -m benchmarks NAME [options]` measures and writes a result file; `--list` names all."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.benchmark import RESULTS, BadOptions, Benchmark, Measured
from benchmarks.options import add_options, read_plan
from kvrecall_server.reporting.results import Row, build_results

# Modules that have a `BENCHMARK`. They are imported one at a time: some take seconds.
MODULES = {
    "ahead": "benchmarks.ahead",
    "beginnings": "benchmarks.beginnings",
    "catalog": "benchmarks.scale.catalog_bytes",
    "fair-shares": "benchmarks.fair_shares.benchmark",
    "first-token": "benchmarks.first_token",
    "forks": "benchmarks.forks",
    "front-door": "benchmarks.front_door.benchmark",
    "fuzz": "benchmarks.fuzz.benchmark",
    "gpu": "benchmarks.gpu",
    "hybrid": "benchmarks.hybrid.benchmark",
    "llama-cpp": "benchmarks.foreign_suites.benchmark",
    "long-turns": "benchmarks.long_turns",
    "metering": "benchmarks.metering.benchmark",
    "moves": "benchmarks.moves",
    "pause-slots": "benchmarks.pause_slots.benchmark",
    "pauses": "benchmarks.pauses",
    "peers": "benchmarks.peers.benchmark",
    "placement": "benchmarks.placement.benchmark",
    "ranks": "benchmarks.ranks.benchmark",
    "repair": "benchmarks.repair",
    "retrieval": "benchmarks.retrieval",
    "scale": "benchmarks.scale.benchmark",
    "settling": "benchmarks.settling",
    "throughput": "benchmarks.throughput",
    "tiers": "benchmarks.tiers.benchmark",
}


def load(name: str) -> Benchmark[Any]:
    """The benchmark of a name."""
    benchmark = import_module(MODULES[name]).BENCHMARK
    assert isinstance(benchmark, Benchmark)
    return benchmark


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark that the command line names; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--list", action="store_true", help="name all benchmarks and exit")
    parser.add_argument("name", nargs="?", choices=MODULES, metavar="NAME")
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in MODULES:
        return run(arguments[0], arguments[1:])
    if not parser.parse_args(arguments).list:
        parser.error(f"name one of {', '.join(MODULES)}, before its options")
    for name in MODULES:
        print(f"{name:<14} {load(name).line}")
    return 0


def run(name: str, options: Sequence[str]) -> int:
    """Measure, print each row, write the result file; the exit code."""
    benchmark = load(name)
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}",
        description=import_module(MODULES[name]).__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser, benchmark.plan)
    parser.add_argument("--out", type=Path, help="the result file; default: in benchmarks/results/")
    given = parser.parse_args(options)
    try:
        measured = benchmark.measure(read_plan(benchmark.plan, given))
    except BadOptions as error:
        parser.error(str(error))
    rows = list[Row]()
    for row in measured.rows:
        rows.append(row)
        print(benchmark.describe(row), flush=True)
    if rows:
        write(benchmark, measured, rows, given.out or RESULTS / measured.file)
    return int(benchmark.failed(rows))


def write(benchmark: Benchmark[Any], measured: Measured, rows: list[Row], out: Path) -> None:
    """Write the result file, with what the measurement adds to versions and machine."""
    merged = benchmark.merge(out, rows)
    results = build_results(benchmark.suite, measured.seed, measured.model, merged)
    replace(
        results,
        versions={**results.versions, **measured.versions},
        machine={**results.machine, **measured.machine},
    ).write(out)


if __name__ == "__main__":
    sys.exit(main())
