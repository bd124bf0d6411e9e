"""Seconds of a repair by the number of candidates (scan, select, move), and bytes read.

`python -m benchmarks repair` scans synthetic keys in the shape of Qwen2.5-7B, from 4K candidates
on, each time twice as many, up to `--largest`: `exact`, `bounded` and `summary` beside a plain
exact scan with all keys in one tensor, and `exact` and `bounded` with a contrast. A candidate takes
about 110 KB of memory in that shape, 4 KB a layer; `--layers` takes fewer layers. `--shape
reference` scans the reference model's own keys. On a machine with a GPU keys are scanned there. The
result file goes to `benchmarks/results/`.
"""

import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, cast, get_args

import torch
from torch import Tensor

from benchmarks.benchmark import Benchmark, Measured
from benchmarks.options import option
from benchmarks.repair_keys import SINKS, ReferenceKeys, SyntheticKeys
from kvrecall.domain.session_settings import PageScan
from kvrecall.reporting.results import Row, speed_row
from kvstore.format.page import PageLayout
from kvstore.format.summaries import Bits
from kvstore.host_cache import HostCache
from kvstore.store import RowStore
from kvstore.tiers.ram import RamTier
from workers.cache.active_cache import EMPTY, ActiveCache, KVShape
from workers.cache.transfers import Transfers
from workers.methods.repairkv import RepairKV
from workers.primitives.observation import Observed
from workers.repair.scan.exact import Contrast, ScanResult, scan

QWEN_7B = KVShape(n_layers=28, n_heads=28, n_kv_heads=4, head_dim=128)
PLAIN = "plain exact scan"
CONTRAST = ", contrast"
RECENT = 32
_T = TypeVar("_T")
Keys = SyntheticKeys | ReferenceKeys


@dataclass(frozen=True)
class Plan:
    """Sizes of a measurement: tokens promoted, repeats of each scan, bits of a summary's codes."""

    promoted: int
    repeats: int
    bits: Bits


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
    shares_at: int = option(32_768, "candidates at which codes are compared; 0: no comparison")
    promoted: int = option(48, "tokens that a repair brings back")
    repeats: int = 3
    bits: int = option(12, "of a summary's codes")
    seed: int = 0


def measure_options(given: Options) -> Measured:
    """Measure repairs of twice as many candidates each time."""
    shape = KVShape(given.layers, QWEN_7B.n_heads, QWEN_7B.n_kv_heads, QWEN_7B.head_dim)
    synthetic = SyntheticKeys(shape, torch.bfloat16, given.seed)
    keys = synthetic if given.shape == "qwen-7b" else ReferenceKeys(given.seed)
    plan = Plan(given.promoted, given.repeats, cast("Bits", given.bits))
    sizes = list(double(given.smallest, given.largest))
    model = f"{given.shape}: {keys.name}, {keys.shape}, {keys.dtype}".replace("torch.", "")
    rows = measure(keys, plan, sizes, given.shares_at, synthetic)
    return Measured("repair.json", model, rows, given.seed)


def double(smallest: int, largest: int) -> Iterator[int]:
    """`smallest`, twice that, and so on, up to `largest`."""
    while smallest <= largest:
        yield smallest
        smallest *= 2


def measure(
    keys: Keys, plan: Plan, sizes: Sequence[int], shares_at: int, synthetic: SyntheticKeys
) -> Iterator[Row]:
    """All rows: times by size, their growth, then bytes read by bits of the codes."""
    seconds: dict[str, dict[int, float]] = {}
    for candidates in sizes:
        with open_bench(keys, candidates, plan.bits) as bench:
            for row in times(bench, plan):
                if row["metric"] == "total":
                    seconds.setdefault(row["method"], {})[candidates] = row["median"]
                yield row
    for method, by_size in seconds.items():
        if len(by_size) > 1:
            condition = f"{method}, {min(by_size)} to {max(by_size)} candidates"
            yield speed_row(condition, "exponent of growth", "", [exponent(by_size)], method=method)
    for source in (synthetic, ReferenceKeys(keys.seed)) if shares_at else ():
        for bits in get_args(Bits):
            with open_bench(source, shares_at, bits) as bench:
                yield from shares(bench, bits)


class Bench:
    """Keys of a session both in a row store and on the device.

    The session's active cache has only its sinks and recent rows.
    """

    def __init__(self, keys: Keys, candidates: int, bits: Bits) -> None:
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
        self.store = RowStore(
            layout, [RamTier(room)], host_cache=HostCache(room), summary_bits=bits
        )
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
            self.store.append("s", torch.stack([piece, piece], dim=1))
            done += piece.shape[2]
        self.store.flush("s")
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

    def scan(
        self, mode: PageScan, operator: RepairKV, count: int, contrast: Contrast | None = None
    ) -> ScanResult:
        """Scores of all tokens by a scan of the row store."""

        def find_ambiguous(lower: Tensor, upper: Tensor) -> Tensor:
            return operator.ambiguous_tokens(
                without_sinks(lower), without_sinks(upper), self.candidate_tokens, count
            )

        return run_to_end(
            scan(
                self.store,
                "s",
                self.keys.observed,
                self.length,
                contrast=contrast,
                mode=mode,
                counted=None,
                find_ambiguous=find_ambiguous,
                stop_requested=lambda: False,
                transfers=self.transfers,
            )
        )

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
def open_bench(keys: Keys, candidates: int, bits: Bits) -> Iterator[Bench]:
    """A bench whose store is closed at the end."""
    bench = Bench(keys, candidates, bits)
    try:
        yield bench
    finally:
        bench.store.close()


def times(bench: Bench, plan: Plan) -> Iterator[Row]:
    """Seconds of every kind of scan in rotation, without the first round, and bytes read."""
    operator = RepairKV()
    scans: dict[str, Callable[[], ScanResult]] = {PLAIN: bench.plain}
    for mode in get_args(PageScan):
        scans[mode] = partial(bench.scan, mode, operator, plan.promoted)
    contrasted_modes: tuple[PageScan, ...] = ("exact", "bounded")
    for each in contrasted_modes:
        scans[each + CONTRAST] = partial(bench.scan, each, operator, plan.promoted, bench.contrast)
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
            exact = runs["exact" + CONTRAST if CONTRAST in name else "exact"]
            yield read_row(condition, bench, found[0], exact[0], **common)


def shares(bench: Bench, bits: int) -> Iterator[Row]:
    """Bytes that a bounded scan reads with codes of `bits` bits, by tokens selected."""
    for count in (16, 48, 96):
        for select in ("spread", "bursts"):
            operator = RepairKV(select=select)
            exact = bench.repair(partial(bench.scan, "exact", operator, count), operator, count)
            bounded = bench.repair(partial(bench.scan, "bounded", operator, count), operator, count)
            condition = (
                f"{bench.keys.name}, {bench.candidates} candidates: "
                f"{bits} bits, {select}, {count} promoted"
            )
            common = {
                "method": "bounded",
                "bits": bits,
                "promoted": count,
                "summary_bytes": bench.store.summary_bytes(),
            }
            yield read_row(condition, bench, bounded, exact, **common)


def read_row(
    condition: str, bench: Bench, run: RepairRun, exact: RepairRun, **common: object
) -> Row:
    """Bytes read, as shares of the candidates' and an exact scan's; whether selections agree."""
    return speed_row(
        condition,
        "bytes read",
        "bytes",
        [run.bytes_read],
        share_of_candidates=round(run.bytes_read / bench.candidate_bytes, 4),
        share_of_exact=round(run.bytes_read / exact.bytes_read, 4),
        same_choice_as_exact=torch.equal(run.chosen, exact.chosen),
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
