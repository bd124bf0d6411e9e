"""Seconds of a repair's scan while its rows are on a cold disk alone.

`python -m benchmarks.repair_cold --directory DIR` writes synthetic keys in the shape of Qwen2.5-7B
to the NVMe tier, and scans them by `exact`, `bounded`, `summary` and `index` in turn, in paired
rounds. Before each scan the page cache of the machine is dropped, which needs root. Nothing is in
the RAM tier; page summaries are in memory, as if there were room for all. `index` has its copy of
the rows in host memory; `index, first` has to make it from the disk. `cpu_seconds` are those of all
threads, and `disk_bytes` what the disk delivered: they depend less on other work on the machine.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from statistics import median
from typing import get_args

import torch

from benchmarks.repair import QWEN_7B, RECENT, RepairRun, run_to_end, timed, without_sinks
from benchmarks.repair_index.subjects import search
from benchmarks.repair_keys import SINKS, SyntheticKeys
from benchmarks.throughput import RESULTS, describe
from kvrecall.domain.session_settings import PageScan
from kvrecall.reporting.results import Row, build_results, speed_row
from kvstore.format.page import PageLayout
from kvstore.host_cache import HostCache
from kvstore.store import RowStore
from kvstore.tiers.nvme.tier import NvmeTier
from workers.cache.active_cache import KVShape
from workers.cache.transfers import Transfers
from workers.methods.repairkv import RepairKV
from workers.repair.scan.base import ScanResult
from workers.repair.scan.exact import scan
from workers.repair.scan.indexed import FOUND_ROWS
from workers.retrieval.indexed_rows import IndexedRows
from workers.retrieval.settings import FOR_REPAIRS

_DROP = Path("/proc/sys/vm/drop_caches")
_ROWS_AT_ONCE = 512


def main() -> None:
    """Read the command line, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, required=True, help="on the disk to measure")
    parser.add_argument("--layers", type=int, default=QWEN_7B.n_layers)
    parser.add_argument("--candidates", type=int, nargs="+", default=[8192, 16_384, 32_768])
    parser.add_argument("--promoted", type=int, default=48)
    parser.add_argument("--scans", nargs="+", help="default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "repair-cold.json")
    given = parser.parse_args()
    shape = KVShape(given.layers, QWEN_7B.n_heads, QWEN_7B.n_kv_heads, QWEN_7B.head_dim)
    keys = SyntheticKeys(shape, torch.bfloat16, given.seed)
    rows = list[Row]()
    for candidates in given.candidates:
        with tempfile.TemporaryDirectory(dir=given.directory) as directory:
            disk = _ColdDisk(keys, candidates, Path(directory))
            with closing(disk.store):
                for row in _measure(disk, given.rounds, given.promoted, given.scans):
                    rows.append(row)
                    print(describe(row), flush=True)
    model = f"qwen-7b: {keys.name}, {shape}, bfloat16"
    build_results("repair-cold", given.seed, model, rows).write(given.out)


class _ColdDisk:
    """Keys of a session on a disk alone."""

    def __init__(self, keys: SyntheticKeys, candidates: int, directory: Path) -> None:
        shape = keys.shape
        self.keys = keys
        self.candidates = candidates
        self.length = SINKS + candidates + RECENT
        layout = PageLayout(shape.n_layers, shape.n_kv_heads, shape.head_dim, keys.dtype, "cold")
        room = layout.page_bytes * (-(-self.length // layout.page_tokens) + 1)
        self.store = RowStore(layout, [NvmeTier(directory)], host_cache=HostCache(room))
        for piece in keys.keys(self.length):
            self.store.append("s", torch.stack([piece, piece], dim=1))
        self.store.flush("s")
        self.copy = IndexedRows(layout, FOR_REPAIRS)
        self.fill()

    def fill(self) -> None:
        """Copy all rows to host memory, into memory that is allocated after the first time."""
        self.copy.truncate(0)
        self.copy.arena.reserve(self.length)
        heads, layers = self.keys.shape.n_kv_heads, self.keys.shape.n_layers
        for first in range(0, self.length, _ROWS_AT_ONCE):
            stop = min(self.length, first + _ROWS_AT_ONCE)
            span = torch.arange(first, stop).expand(heads, -1).contiguous()
            self.copy.append(self.store.gather_selection("s", [span] * layers))

    def scan_pages(self, mode: PageScan, operator: RepairKV, count: int) -> ScanResult:
        """Scan the stored pages."""

        def find_ambiguous(lower: torch.Tensor, upper: torch.Tensor) -> torch.Tensor:
            bounds = without_sinks(lower), without_sinks(upper)
            return operator.ambiguous_tokens(*bounds, self.evicted(), count)

        running = scan(
            self.store,
            "s",
            self.keys.observed,
            self.length,
            mode=mode,
            counted=None,
            find_ambiguous=find_ambiguous,
            stop_requested=lambda: False,
            transfers=Transfers(torch.device("cpu")),
        )
        return run_to_end(running)

    def scan_copy(self, *, first: bool) -> ScanResult:
        """Scan the copy in host memory; `first`: make it before."""
        if first:
            self.fill()
        return search(self.copy, self.keys.observed, FOUND_ROWS)

    def evicted(self) -> torch.Tensor:
        """Mask of the candidates, bool `[length]`."""
        evicted = torch.zeros(self.length, dtype=torch.bool)
        evicted[SINKS : SINKS + self.candidates] = True
        return evicted

    def repair(self, run_scan: Callable[[], ScanResult], operator: RepairKV, n: int) -> RepairRun:
        """Drop the page cache, then scan and select."""
        os.sync()
        _DROP.write_text("3")
        cpu, read = time.process_time(), _read_from_disk()
        seconds, found = timed(run_scan)
        cpu, read = time.process_time() - cpu, _read_from_disk() - read
        worth = operator.utility(without_sinks(found.scores))
        chosen = operator.choose(worth, self.evicted(), torch.zeros(self.length), n)
        return RepairRun({"scan": seconds, "cpu": cpu, "disk": read}, chosen, found.bytes_read)


def _read_from_disk() -> int:
    """Bytes that this process has read from a disk."""
    lines = Path("/proc/self/io").read_text("ascii").splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


def _measure(
    disk: _ColdDisk, rounds: int, promoted: int, wanted: list[str] | None
) -> Iterator[Row]:
    operator = RepairKV()
    scans: dict[str, Callable[[], ScanResult]] = {
        mode: partial(disk.scan_pages, mode, operator, promoted) for mode in get_args(PageScan)
    }
    scans["index, first"] = partial(disk.scan_copy, first=True)
    scans["index"] = partial(disk.scan_copy, first=False)
    scans = {name: scans[name] for name in wanted or scans}
    runs = {name: list[RepairRun]() for name in scans}
    for _ in range(rounds):
        for name, run_scan in scans.items():
            runs[name].append(disk.repair(run_scan, operator, promoted))
    exact = [run.seconds["scan"] for run in runs["exact"]]
    for name, found in runs.items():
        seconds = [run.seconds["scan"] for run in found]
        pairs = [one / other for one, other in zip(seconds, exact, strict=True)]
        same = found[0].chosen.tolist() == runs["exact"][0].chosen.tolist()
        columns = {
            "method": name,
            "candidates": disk.candidates,
            "ratio_to": "exact",
            "ratio": round(median(pairs), 3),
            "ratios": [round(pair, 3) for pair in pairs],
            "cpu_seconds": round(median(run.seconds["cpu"] for run in found), 3),
            "disk_bytes": round(median(run.seconds["disk"] for run in found)),
            "bytes_read": found[0].bytes_read,
            "summary_bytes": disk.store.summary_bytes(),
            "copy_bytes": disk.length * disk.store.layout.token_bytes,
            "same_choice_as_exact": same,
        }
        condition = f"{disk.candidates} candidates on a cold disk: {name}"
        yield speed_row(condition, "scan", "seconds", seconds, **columns)


if __name__ == "__main__":
    main()
