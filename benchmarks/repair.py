"""Seconds of a repair by the number of candidates, split into scan, select and move, and what it reads.

`python benchmarks/repair.py` scans keys in the shape of Qwen2.5-7B, made up, from 4K candidates on, each time twice as
many, to `--largest`: `exact`, `bounded` and `summary` beside a plain exact scan that has all keys in one tensor. A
candidate takes about 110 KB of memory in that shape, 4 KB a layer; `--layers` takes fewer layers. `--shape reference`
scans the reference model's own keys. On a machine with a GPU keys are scanned there. The result file goes to
`benchmarks/results/`.
"""

import argparse
import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar, get_args

import torch
from torch import Tensor

from benchmarks.repair_keys import SINKS, MadeUp, ReferenceKeys
from benchmarks.throughput import RESULTS, describe
from kvrecall.reporting.results import Row, build_results, speed_row
from kvstore.format.page import PageLayout
from kvstore.format.summaries import Bits
from kvstore.store import RowStore
from kvstore.tiers.ram import RamTier
from workers.cache.active_cache import EMPTY, ActiveCache, KVShape
from workers.methods.repairkv import RepairKV
from workers.repair.scan.exact import How, ScanResult, scan

QWEN_7B = KVShape(n_layers=28, n_heads=28, n_kv_heads=4, head_dim=128)
PLAIN = "plain exact scan"
RECENT = 32
_T = TypeVar("_T")
Keys = MadeUp | ReferenceKeys


@dataclass(frozen=True)
class Plan:
    """What is measured: tokens promoted, repeats of each scan, bits of a summary's codes."""

    promoted: int
    repeats: int
    bits: Bits


@dataclass(frozen=True)
class Repaired:
    """One repair: seconds of its parts, what it chose, int64 positions, and what it read, bytes."""

    seconds: dict[str, float]
    chosen: Tensor
    bytes_read: int


def main() -> None:
    """Read the command line, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=("qwen-7b", "reference"), default="qwen-7b")
    parser.add_argument("--layers", type=int, default=QWEN_7B.n_layers, help="of the made-up keys")
    parser.add_argument("--smallest", type=int, default=4096, help="candidates")
    parser.add_argument("--largest", type=int, default=65_536, help="candidates; up to 1,048,576")
    parser.add_argument(
        "--shares-at",
        type=int,
        default=32_768,
        help="candidates where codes are compared; 0: nowhere",
    )
    parser.add_argument("--promoted", type=int, default=48, help="tokens that a repair brings back")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--bits", type=int, choices=get_args(Bits), default=12, help="of a summary's codes"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/repair.json")
    given = parser.parse_args()
    shape = KVShape(given.layers, QWEN_7B.n_heads, QWEN_7B.n_kv_heads, QWEN_7B.head_dim)
    made_up = MadeUp(shape, torch.bfloat16, given.seed)
    keys = made_up if given.shape == "qwen-7b" else ReferenceKeys(given.seed)
    plan = Plan(given.promoted, given.repeats, given.bits)
    rows = []
    for row in measured(
        keys, plan, list(doubled(given.smallest, given.largest)), given.shares_at, made_up
    ):
        rows.append(row)
        read = (
            f"  {row['share_of_candidates']:.3f} of the candidates'"
            if "share_of_candidates" in row
            else ""
        )
        print(describe(row) + read, flush=True)
    model = f"{given.shape}: {keys.name}, {keys.shape}, {keys.dtype}".replace("torch.", "")
    build_results("repair", given.seed, model, rows).write(given.out or RESULTS / "repair.json")


def doubled(smallest: int, largest: int) -> Iterator[int]:
    """Smallest, twice that, and so on, up to largest."""
    while smallest <= largest:
        yield smallest
        smallest *= 2


def measured(
    keys: Keys, plan: Plan, sizes: Sequence[int], shares_at: int, made_up: MadeUp
) -> Iterator[Row]:
    """All rows: times by size, their growth, then the shares read by codes of each size, on both kinds of keys."""
    seconds: dict[str, dict[int, float]] = {}
    for candidates in sizes:
        with stored(keys, candidates, plan.bits) as bench:
            for row in times(bench, plan):
                if row["metric"] == "total":
                    seconds.setdefault(row["method"], {})[candidates] = row["median"]
                yield row
    for method, by_size in seconds.items():
        if len(by_size) > 1:
            condition = f"{method}, {min(by_size)} to {max(by_size)} candidates"
            yield speed_row(condition, "exponent of growth", "", [exponent(by_size)], method=method)
    for of in (made_up, ReferenceKeys(keys.seed)) if shares_at else ():
        for bits in get_args(Bits):
            with stored(of, shares_at, bits) as bench:
                yield from shares(bench, bits)


class Bench:
    """A session's keys in a row store and on the device at once, and the active cache of a session that kept little."""

    def __init__(self, keys: Keys, candidates: int, bits: Bits) -> None:
        self.of = keys
        self.candidates = candidates
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.length = SINKS + candidates + RECENT
        shape = keys.shape
        layout = PageLayout(
            shape.n_layers, shape.n_kv_heads, shape.head_dim, keys.dtype, "benchmark"
        )
        room = layout.page_bytes * (-(-self.length // layout.page_tokens) + 1)
        self.store = RowStore(layout, [RamTier(room)], summary_limit=room, summary_bits=bits)
        self.resident = [
            torch.empty(
                shape.n_kv_heads, self.length, shape.head_dim, dtype=keys.dtype, device=self.device
            )
            for _ in range(shape.n_layers)
        ]
        done = 0
        for piece in keys.keys(self.length):
            for layer, of_layer in enumerate(self.resident):
                of_layer[:, done : done + piece.shape[2]] = piece[layer]
            # Values are moved and never looked at: the keys again do.
            self.store.append("s", torch.stack([piece, piece], dim=1))
            done += piece.shape[2]
        self.store.flush("s")
        self.candidate_tokens = torch.zeros(self.length, dtype=torch.bool)
        self.candidate_tokens[SINKS : SINKS + candidates] = True

    @property
    def candidate_bytes(self) -> int:
        """Keys and values of the candidates."""
        return self.candidates * self.store.layout.token_bytes

    def plain(self) -> ScanResult:
        """Scores of all tokens, in the simplest way: keys are on the device, one multiplication for each layer."""
        observed = self.of.observed
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

    def scanned(self, how: How, operator: RepairKV, count: int) -> ScanResult:
        """Scores of all tokens from the row store."""

        def doubts(lower: Tensor, upper: Tensor) -> Tensor:
            return operator.doubts(
                without_sinks(lower), without_sinks(upper), self.candidate_tokens, count
            )

        return finished(
            scan(
                self.store,
                "s",
                self.of.observed,
                self.length,
                how=how,
                counted=None,
                doubts=doubts,
                hurried=lambda: False,
                device=self.device,
            )
        )

    def repair(self, scanned: Callable[[], ScanResult], operator: RepairKV, count: int) -> Repaired:
        """Scan, select, move; the cache is as before afterwards."""
        seconds: dict[str, float] = {}
        seconds["scan"], found = timed(scanned)
        seconds["select"], chosen = timed(lambda: self.choose(found.scores, operator, count))
        seconds["move"], _ = timed(lambda: self.move(chosen))
        seconds["total"] = sum(seconds.values())
        return Repaired(seconds, chosen, found.bytes_read)

    def choose(self, scores: Tensor, operator: RepairKV, count: int) -> Tensor:
        """The tokens to promote, int64 positions."""
        worth = operator.worth(without_sinks(scores))
        return operator.choose(worth, self.candidate_tokens, torch.zeros(self.length), count)

    def move(self, chosen: Tensor) -> None:
        """Gather rows from the store and put them among sinks and recent rows of a new slot, in every layer."""
        shape = self.of.shape
        rows = [len(chosen) + SINKS + RECENT] * self.of.shape.n_layers
        cache = ActiveCache(shape, 1, rows, self.of.dtype, self.device)
        slot = cache.claim(rows)
        wanted = [chosen.expand(shape.n_kv_heads, -1)] * shape.n_layers
        for layer, (keys, values) in enumerate(self.store.gather_selection("s", wanted)):
            places = wanted[layer].to(torch.int32)
            cache.insert(slot, layer, places, keys, values, places != EMPTY)


@contextmanager
def stored(keys: Keys, candidates: int, bits: Bits) -> Iterator[Bench]:
    """A bench, whose store is closed at the end."""
    bench = Bench(keys, candidates, bits)
    try:
        yield bench
    finally:
        bench.store.close()


def times(bench: Bench, plan: Plan) -> Iterator[Row]:
    """Seconds of every kind of scan in rotation, after one round that does not count, and what was read."""
    operator = RepairKV()
    ways: dict[str, Callable[[], ScanResult]] = {PLAIN: bench.plain}
    for how in get_args(How):
        ways[how] = partial(bench.scanned, how, operator, plan.promoted)
    runs: dict[str, list[Repaired]] = {name: [] for name in ways}
    for repeat in range(plan.repeats + 1):
        for name, way in ways.items():
            run = bench.repair(way, operator, plan.promoted)
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
            yield read_row(condition, bench, found[0], runs["exact"][0], **common)


def shares(bench: Bench, bits: int) -> Iterator[Row]:
    """What a bounded scan reads with codes of so many bits, by the number of tokens that it chooses."""
    for count in (16, 48, 96):
        for select in ("spread", "bursts"):
            operator = RepairKV(select=select)
            exact = bench.repair(partial(bench.scanned, "exact", operator, count), operator, count)
            bounded = bench.repair(
                partial(bench.scanned, "bounded", operator, count), operator, count
            )
            condition = f"{bench.of.name}, {bench.candidates} candidates: {bits} bits, {select}, {count} promoted"
            common = {
                "method": "bounded",
                "bits": bits,
                "promoted": count,
                "summary_bytes": bench.store.summary_bytes(),
            }
            yield read_row(condition, bench, bounded, exact, **common)


def read_row(condition: str, bench: Bench, run: Repaired, exact: Repaired, **common: object) -> Row:
    """Bytes read, as they are, of the candidates' and of what an exact scan reads; whether the choice is the same."""
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
    """Scores in which sinks lead to nothing, as a repair takes them."""
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


def finished(running: Generator[None, None, _T]) -> _T:
    """Run a scan to its end."""
    while True:
        try:
            next(running)
        except StopIteration as done:
            result: _T = done.value
            return result


def timed(work: Callable[[], _T]) -> tuple[float, _T]:
    """Seconds that some work took, on the device as well, and what it returned."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    done = work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started, done


if __name__ == "__main__":
    main()
