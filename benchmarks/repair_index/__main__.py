"""Repairs through the index beside exact scans of the same rows in memory.

`python -m benchmarks.repair_index reference` takes the reference model's keys after 16,128 tokens of
generated conversations, and as signals what comes next, 16 tokens at a time. `made-up` takes one
layer of made-up keys, 65,536 to 1,048,576 rows: 3 GB of memory. Each arm is compared with the
choice of an exact scan, which reads every page twice. Times are CPU time of one thread, so that it
can run beside other work. Result files go to `benchmarks/results/`.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from benchmarks.key_index.measure import clock
from benchmarks.repair import exponent
from benchmarks.repair_index.subjects import Session, made_up_session, reference_sessions, search
from benchmarks.throughput import RESULTS
from kvrecall.reporting.results import Row, bootstrap, build_results, quality_row, speed_row
from workers.repair.scan.base import ScanResult
from workers.repair.scan.indexed import FOUND_ROWS
from workers.retrieval.indexed_rows import IndexedRows
from workers.retrieval.settings import Retrieval

ROWS = {"reference": (16_128,), "made-up": (65_536, 262_144, 1_048_576)}
EXACT = "exact"
# Tokens that a repair brings back.
PROMOTED = (64, 512)


def main() -> None:
    """Read the command line, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("keys", choices=ROWS)
    parser.add_argument("--rows", type=int, nargs="+", help="rows per head")
    parser.add_argument("--found", type=int, nargs="+", default=[8, FOUND_ROWS, 128])
    parser.add_argument("--scans", type=float, nargs="*", default=[0.02, 0.05, 0.1, 0.2])
    parser.add_argument("--sessions", type=int, default=4, help="of the reference model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="default: in benchmarks/results/")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for row in measure(given):
        rows.append(row)
        print(row, flush=True)
    results = build_results("repair-index", given.seed, given.keys, rows)
    results.write(given.out or RESULTS / f"repair-index-{given.keys}.json")


def measure(given: argparse.Namespace) -> Iterator[Row]:
    """All rows, then how times grow with the number of rows."""
    seconds: dict[str, dict[int, float]] = {}
    for size in given.rows or ROWS[given.keys]:
        runs = _Runs(f"{given.keys}, {size} rows", given.seed)
        if given.keys == "reference":
            for session in reference_sessions(size, range(given.seed, given.seed + given.sessions)):
                runs.add(session, given.found, given.scans)
        else:
            runs.add(made_up_session(size, given.seed), given.found, given.scans)
        for row in runs.rows():
            if row.get("metric") == "scan":
                seconds.setdefault(row["method"], {})[size] = row["median"]
            yield row
    for method, by_size in seconds.items():
        if len(by_size) > 1:
            condition = f"{method}, {min(by_size)} to {max(by_size)} rows"
            yield speed_row(condition, "exponent of growth", "", [exponent(by_size)], method=method)


class _Runs:
    """Scans of every arm over the sessions of one size."""

    def __init__(self, condition: str, seed: int) -> None:
        self._condition = condition
        self._seed = seed
        self._seconds: dict[str, list[float]] = {}
        self._overlaps: dict[tuple[str, int], list[float]] = {}
        self._shares: dict[str, list[float]] = {}
        self._builds: dict[str, list[float]] = {}

    def add(self, session: Session, found: list[int], scans: list[float]) -> None:
        """Run all arms on a session's signals; times are those of its longest signals."""
        chosen = []
        for signal in session.signals:
            seconds, result = _timed(partial(session.exact, signal), session.runs(signal))
            chosen.append({count: session.choose(result, count) for count in PROMOTED})
            if signal.tokens == session.signals[0].tokens:
                self._seconds.setdefault(EXACT, []).append(seconds)
        for count in found:
            name = f"index, {count} rows a query"
            self._add_arm(session, name, Retrieval(index="exact"), count, chosen)
        for scan in scans:
            settings = Retrieval(index="tree", scan=scan)
            self._add_arm(session, f"tree, scan {scan:g}", settings, FOUND_ROWS, chosen)

    def _add_arm(
        self,
        session: Session,
        name: str,
        settings: Retrieval,
        found_rows: int,
        expected: list[dict[int, set[int]]],
    ) -> None:
        rows = session.rows(settings)
        build = clock(partial(_build, rows))
        heads = session.layout.n_layers * session.layout.n_kv_heads
        if settings.index == "tree":
            self._builds.setdefault(name, []).append(1e6 * build / heads / session.length)
        for signal, exact in zip(session.signals, expected, strict=True):
            scan = partial(search, rows, signal, found_rows)
            seconds, result = _timed(scan, session.runs(signal))
            if signal.tokens == session.signals[0].tokens:
                self._seconds.setdefault(name, []).append(seconds)
            self._shares.setdefault(name, []).append(result.searched_share)
            for count, wanted in exact.items():
                alike = len(session.choose(result, count) & wanted) / count
                self._overlaps.setdefault((name, count), []).append(alike)

    def rows(self) -> Iterator[Row]:
        """Rows of the result file."""
        base = sorted(self._seconds[EXACT])[len(self._seconds[EXACT]) // 2]
        for name, seconds in self._seconds.items():
            ratio = round(sorted(seconds)[len(seconds) // 2] / base, 3)
            against = {} if name == EXACT else {"ratio_to": EXACT, "ratio": ratio}
            yield speed_row(self._condition, "scan", "seconds", seconds, method=name, **against)
        for (name, count), overlaps in self._overlaps.items():
            estimate = bootstrap(overlaps, self._seed, draws=200)
            assert estimate, "a session has signals"
            columns = {"method": name, "promoted": count, "lowest": round(min(overlaps), 3)}
            yield quality_row(f"{self._condition}: overlap with exact", estimate, **columns)
        for name, shares in self._shares.items():
            yield speed_row(self._condition, "searched share", "", shares, method=name)
        for name, builds in self._builds.items():
            unit = "microseconds per row and head"
            yield speed_row(self._condition, "building of the index", unit, builds, method=name)


def _build(rows: IndexedRows) -> None:
    for _ in rows.index_rows():
        pass


def _timed(work: Callable[[], ScanResult], runs: int) -> tuple[float, ScanResult]:
    """Seconds of CPU time, the least of some runs, and the result."""
    result = list[ScanResult]()
    return min(clock(lambda: result.append(work())) for _ in range(runs)), result[0]


if __name__ == "__main__":
    main()
