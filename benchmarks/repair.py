"""Seconds of a repair by the number of candidates (scan, select, move), and bytes read.

`python -m benchmarks repair` scans synthetic keys in the shape of Qwen2.5-7B, from 4K candidates
on, each time twice as many, up to `--largest`: in stored pages and in a copy of the rows in host
memory, with and without a contrast, beside a plain scan with all keys in one tensor. A candidate
takes about 110 KB of memory in that shape, 4 KB a layer, three times; `--layers` takes fewer
layers. `--shape reference` scans the reference model's own keys. On a machine with a GPU keys are
scanned there. The result file goes to `benchmarks/results/`.
"""

import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from benchmarks.benchmark import Benchmark, Measured
from benchmarks.made_up_copy import make_ids
from benchmarks.options import option
from benchmarks.repair_keys import SINKS, ReferenceKeys, SyntheticKeys
from kvrecall_server.reporting.results import Row, speed_row
from kvstore.format.page import PageLayout
from kvstore.store import RowStore
from kvstore.tiers.ram import RamTier
from workers.cache.active_cache import EMPTY, ActiveCache, KVShape
from workers.cache.transfers import Transfers
from workers.engine.host.cache import HostCache
from workers.generation.host_copy import PageTaker
from workers.methods.repairkv import RepairKV
from workers.primitives.observation import Observed
from workers.repair.scan.keys import CopiedKeys, KeySource, StoredKeys
from workers.repair.scan.result import ScanResult
from workers.repair.scan.softmax import Contrast, Signal
from workers.repair.scan.tokens import scan_tokens
from workers.retrieval.host_copy import HostCopy

QWEN_7B = KVShape(n_layers=28, n_heads=28, n_kv_heads=4, head_dim=128)
PLAIN = "all keys in one tensor"
PAGES = "pages"
COPY = "copy"
CONTRAST = ", contrast"
RECENT = 32
_T = TypeVar("_T")
Keys = SyntheticKeys | ReferenceKeys


@dataclass(frozen=True)
class Plan:
    """Sizes of a measurement: tokens promoted, repeats of each scan."""

    promoted: int
    repeats: int


@dataclass(frozen=True)
class RepairRun:
    """One repair: seconds of its parts, selected int64 positions, and bytes read."""

    seconds: dict[str, float]
    chosen: Tensor
    bytes_read: int


@dataclass(frozen=True)
class Options:
    """Whose keys are scanned, and how many."""

    shape: str = option("qwen-7b", choices=("qwen-7b", "reference"))
    layers: int = option(QWEN_7B.n_layers, "of the synthetic keys")
    smallest: int = option(4096, "candidates")
    largest: int = option(65_536, "candidates; up to 1,048,576")
    promoted: int = option(48, "tokens that a repair brings back")
    repeats: int = 3
    seed: int = 0


def measure_options(given: Options) -> Measured:
    """Measure repairs of twice as many candidates each time."""
    shape = KVShape(given.layers, QWEN_7B.n_heads, QWEN_7B.n_kv_heads, QWEN_7B.head_dim)
    synthetic = SyntheticKeys(shape, torch.bfloat16, given.seed)
    keys = synthetic if given.shape == "qwen-7b" else ReferenceKeys(given.seed)
    plan = Plan(given.promoted, given.repeats)
    sizes = list(double(given.smallest, given.largest))
    model = f"{given.shape}: {keys.name}, {keys.shape}, {keys.dtype}".replace("torch.", "")
    rows = measure(keys, plan, sizes)
    return Measured("repair.json", model, rows, given.seed)


def double(smallest: int, largest: int) -> Iterator[int]:
    """`smallest`, twice that, and so on, up to `largest`."""
    while smallest <= largest:
        yield smallest
        smallest *= 2


def measure(keys: Keys, plan: Plan, sizes: Sequence[int]) -> Iterator[Row]:
    """All rows: times by size, then their growth."""
    seconds: dict[str, dict[int, float]] = {}
    for candidates in sizes:
        with open_bench(keys, candidates) as bench:
            for row in times(bench, plan):
                if row["metric"] == "total":
                    seconds.setdefault(row["method"], {})[candidates] = row["median"]
                yield row
    for method, by_size in seconds.items():
        if len(by_size) > 1:
            condition = f"{method}, {min(by_size)} to {max(by_size)} candidates"
            yield speed_row(condition, "exponent of growth", "", [exponent(by_size)], method=method)


class Bench:
    """Keys of a session in a row store, in a copy of its rows, and on the device.

    The session's active cache has only its sinks and recent rows.
    """

    def __init__(self, keys: Keys, candidates: int) -> None:
        self.keys = keys
        self.candidates = candidates
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.transfers = Transfers(self.device)
        self.length = SINKS + candidates + RECENT
        shape = keys.shape
        layout = PageLayout(
            shape.n_layers, shape.n_kv_heads, shape.head_dim, keys.dtype, "benchmark"
        )
        room = layout.page_bytes * (-(-self.length // layout.page_tokens) + 1)
        memory = RamTier(room)
        self.store = RowStore(layout, [memory])
        self.copy = HostCopy(layout, None)
        self.resident = [
            torch.empty(
                shape.n_kv_heads, self.length, shape.head_dim, dtype=keys.dtype, device=self.device
            )
            for _ in range(shape.n_layers)
        ]
        done = 0
        for piece in keys.keys(self.length):
            for layer, layer_keys in enumerate(self.resident):
                layer_keys[:, done : done + piece.shape[2]] = piece[layer]
            # Values are only moved, never read: the keys serve as values.
            ids = make_ids(layout, done, piece.shape[2])
            self.store.append("s", torch.stack([piece, piece], dim=1), ids)
            done += piece.shape[2]
        self.store.flush("s")
        cache = HostCache(memory, layout.page_bytes)
        self.taker = PageTaker(self.copy, cache, self.store, "s", self.length)
        self.candidate_tokens = torch.zeros(self.length, dtype=torch.bool)
        self.candidate_tokens[SINKS : SINKS + candidates] = True

    @property
    def candidate_bytes(self) -> int:
        """Bytes of the candidates' keys and values."""
        return self.candidates * self.store.layout.token_bytes

    def plain(self) -> ScanResult:
        """Scores of all tokens with the keys on the device, by one multiplication per layer."""
        observed = self.keys.observed
        total = torch.zeros(self.length, device=self.device)
        for queries, keys in zip(observed.queries, self.resident, strict=True):
            n_heads, t, head_dim = queries.shape
            grouped = (
                queries.to(self.device).float().reshape(len(keys), -1, head_dim) * head_dim**-0.5
            )
            weights = (grouped @ keys.float().transpose(1, 2)).softmax(-1)
            total += weights.view(n_heads, t, self.length).amax(1).sum(0)
        scores = (total / (len(self.resident) * observed.queries[0].shape[0])).cpu()
        return ScanResult(scores, torch.ones(self.length, dtype=torch.bool), 0, True)

    @property
    def contrast(self) -> Contrast:
        """A neutral signal of the last half of the signal's tokens, as the chat template is."""
        observed = self.keys.observed
        half = observed.tokens // 2
        queries = tuple(layer[:, half:] for layer in observed.queries)
        return Contrast(Observed(queries, observed.positions[half:]), RepairKV().contrast)

    def scan(self, place: str, contrast: Contrast | None = None) -> ScanResult:
        """Scores of all tokens by a scan of the row store's pages, or of a copy of its rows."""
        n_kv_heads = self.keys.shape.n_kv_heads
        signal = Signal(self.keys.observed, n_kv_heads, self.device, contrast)
        keys: KeySource
        if place == PAGES:
            keys = StoredKeys(self.store, "s", self.length, self.transfers)
        else:
            keys = CopiedKeys(self.copy, self.taker, self.transfers)
        return run_to_end(scan_tokens(keys, signal))

    def repair(
        self, run_scan: Callable[[], ScanResult], operator: RepairKV, count: int
    ) -> RepairRun:
        """Run scan, select and move; the active cache is unchanged afterwards."""
        seconds: dict[str, float] = {}
        seconds["scan"], found = timed(run_scan)
        seconds["select"], chosen = timed(lambda: self.choose(found.scores, operator, count))
        seconds["move"], _ = timed(lambda: self.move(chosen))
        seconds["total"] = sum(seconds.values())
        return RepairRun(seconds, chosen, found.bytes_read)

    def choose(self, scores: Tensor, operator: RepairKV, count: int) -> Tensor:
        """Positions of the tokens to promote, int64."""
        worth = operator.utility(without_sinks(scores))
        return operator.choose(worth, self.candidate_tokens, torch.zeros(self.length), count)

    def move(self, chosen: Tensor) -> None:
        """Gather rows from the store and insert them into a new slot with sinks and recent rows."""
        shape = self.keys.shape
        rows = [len(chosen) + SINKS + RECENT] * self.keys.shape.n_layers
        cache = ActiveCache(shape, 1, rows, self.keys.dtype, self.device)
        slot = cache.claim(rows)
        wanted = [chosen.expand(shape.n_kv_heads, -1)] * shape.n_layers
        for layer, (keys, values) in enumerate(self.store.gather_selection("s", wanted)):
            positions = wanted[layer].to(torch.int32)
            cache.insert(slot, layer, positions, keys, values, positions != EMPTY)


@contextmanager
def open_bench(keys: Keys, candidates: int) -> Iterator[Bench]:
    """A bench whose store is closed at the end."""
    bench = Bench(keys, candidates)
    try:
        yield bench
    finally:
        bench.store.close()


def times(bench: Bench, plan: Plan) -> Iterator[Row]:
    """Seconds of every scan in rotation, without the first round, which makes the copy; bytes read."""
    operator = RepairKV()
    scans: dict[str, Callable[[], ScanResult]] = {PLAIN: bench.plain}
    for place in (PAGES, COPY):
        scans[place] = partial(bench.scan, place)
        scans[place + CONTRAST] = partial(bench.scan, place, bench.contrast)
    runs: dict[str, list[RepairRun]] = {name: [] for name in scans}
    for repeat in range(plan.repeats + 1):
        for name, run_scan in scans.items():
            run = bench.repair(run_scan, operator, plan.promoted)
            if repeat:
                runs[name].append(run)
    for name, found in runs.items():
        common = {"method": name, "candidates": bench.candidates}
        condition = f"{bench.candidates} candidates: {name}"
        for part in ("scan", "select", "move", "total"):
            values = [run.seconds[part] for run in found]
            base = sorted(run.seconds[part] for run in runs[PLAIN])[plan.repeats // 2]
            ratio = {"ratio_to": PLAIN, "ratio": round(sorted(values)[plan.repeats // 2] / base, 3)}
            yield speed_row(
                condition, part, "seconds", values, **common, **(ratio if name != PLAIN else {})
            )
        if name != PLAIN:
            pages = runs[PAGES + CONTRAST if CONTRAST in name else PAGES]
            yield read_row(condition, bench, found[0], pages[0], **common)


def read_row(
    condition: str, bench: Bench, run: RepairRun, pages: RepairRun, **common: object
) -> Row:
    """Bytes read, as a share of the candidates'; whether a scan of the pages selects the same."""
    return speed_row(
        condition,
        "bytes read",
        "bytes",
        [run.bytes_read],
        share_of_candidates=round(run.bytes_read / bench.candidate_bytes, 4),
        same_choice_as_pages=torch.equal(run.chosen, pages.chosen),
        **common,
    )


def without_sinks(scores: Tensor) -> Tensor:
    """Scores with those of the sinks set to 0, as in a repair."""
    scores = scores.clone()
    scores[:SINKS] = 0
    return scores


def exponent(seconds: dict[int, float]) -> float:
    """The slope of log seconds over log candidates, by least squares."""
    x = [math.log(n) for n in seconds]
    y = [math.log(s) for s in seconds.values()]
    mean_x = sum(x) / len(x)
    mean_y = sum(y) / len(y)
    rise = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return rise / sum((a - mean_x) ** 2 for a in x)


def run_to_end(running: Generator[None, None, _T]) -> _T:
    """Run a scan to its end and return its result."""
    while True:
        try:
            next(running)
        except StopIteration as done:
            result: _T = done.value
            return result


def timed(work: Callable[[], _T]) -> tuple[float, _T]:
    """Seconds of `work`, its work on the device included, and its result."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    done = work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started, done


BENCHMARK = Benchmark("repair", "seconds of a repair by its candidates", Options, measure_options)
