"""Time of sparse attention over a block's lines, beside dense attention of the same block.

Dense and sparse attention run in turns, and a ratio is of such a pair; the search of the lines is timed
apart. Times are CPU time on a CPU, so that it can run beside other work, and wall time on a GPU.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from benchmarks.sparse_prefill.blocks import DenseAttention, Shape, plant_block
from benchmarks.subjects import clock
from benchmarks.throughput import RESULTS, describe
from kvrecall.reporting.results import Row, build_results, speed_row
from workers.prefill.attention import attend, find_places
from workers.prefill.block_rows import BlockRows
from workers.prefill.lines import Lines, choose_lines
from workers.prefill.settings import Prefill

SMALL = Shape(4, 2, 64)
QWEN_7B = Shape(28, 4, 128)
SHARES = (0.1, 0.25)
GPU_ROWS = (8192, 16_384, 32_768, 65_536)
GPU_BLOCKS = (512, 1024, 2048)


@dataclass(frozen=True)
class Plan:
    """What is measured: sizes, settings, and where."""

    shape: Shape
    rows: tuple[int, ...]
    blocks: tuple[int, ...]
    settings: Prefill
    pairs: int
    seed: int
    device: torch.device
    dtype: torch.dtype


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--gpu", action="store_true", help="the sizes of a 7B model, on a GPU")
    parser.add_argument("--rows", type=int, nargs="+", help="rows per head, the block's included")
    parser.add_argument("--blocks", type=int, nargs="+", help="tokens of a block")
    parser.add_argument("--alpha", type=float, default=0.955)
    parser.add_argument("--pairs", type=int, default=9, help="timed pairs of dense and sparse")
    parser.add_argument("--threads", type=int, default=1, help="on a CPU")


def run(given: argparse.Namespace) -> None:
    """Measure, print, write."""
    torch.set_num_threads(given.threads)
    plan = build_plan(given)
    rows = []
    with torch.inference_mode():
        for row in measure(plan):
            rows.append(row)
            print(describe(row), flush=True)
    model = f"synthetic rows, {plan.shape}, {plan.dtype}".replace("torch.", "")
    where = "gpu" if given.gpu else "cpu"
    results = build_results("sparse-prefill", plan.seed, model, rows)
    results.write(given.out or RESULTS / f"sparse-prefill-{where}.json")


def build_plan(given: argparse.Namespace) -> Plan:
    """Choose sizes and device from the options."""
    return Plan(
        QWEN_7B if given.gpu else SMALL,
        tuple(given.rows or (GPU_ROWS if given.gpu else (16_384,))),
        tuple(given.blocks or (GPU_BLOCKS if given.gpu else (512,))),
        Prefill(sparse="on", alpha=given.alpha),
        given.pairs,
        given.seed,
        torch.device("cuda" if given.gpu else "cpu"),
        torch.bfloat16 if given.gpu else torch.float32,
    )


def measure(plan: Plan) -> Iterator[Row]:
    """The rows of every size, block and density of lines."""
    for n in plan.rows:
        for tokens in plan.blocks:
            for share in SHARES:
                block = plant_block(
                    plan.shape,
                    n,
                    tokens,
                    share,
                    plan.seed,
                    device=plan.device,
                    dtype=plan.dtype,
                )
                condition = f"{n} rows, block {tokens}, lines of {share:.0%}"
                yield from measure_block(plan, block, condition)


def measure_block(plan: Plan, rows: BlockRows, condition: str) -> Iterator[Row]:
    """Times of one block: dense, sparse and search, the ratio of pairs; density, cover, error."""
    lines = find_lines(plan, rows)
    if lines is None:
        raise SystemExit(f"{condition}: exact attention pays; take a smaller --alpha")
    dense = DenseAttention(rows)
    exact = dense()
    places = find_places(rows, lines, plan.settings)
    error = float((attend(rows, places) - exact).abs().max())
    times = [
        (clock(plan.device, dense), clock(plan.device, lambda: attend_sparsely(plan, rows, lines)))
        for _ in range(plan.pairs)
    ]
    search = [clock(plan.device, lambda: find_lines(plan, rows)) for _ in range(plan.pairs)]
    yield speed_row(condition, "dense", "seconds", [pair[0] for pair in times], method="dense")
    yield speed_row(condition, "sparse", "seconds", [pair[1] for pair in times], method="sparse")
    yield speed_row(condition, "search", "seconds", search, method="search")
    yield speed_row(condition, "dense / sparse", "ratio", [a / b for a, b in times])
    with_search = [a / (b + median(search)) for a, b in times]
    yield speed_row(condition, "dense / (sparse and search)", "ratio", with_search)
    yield speed_row(condition, "density", "share of rows", [float(places.density.mean())])
    yield speed_row(condition, "cover, least of a head", "share", [float(lines.cover.min())])
    yield speed_row(condition, "largest error of an output", "", [error])


def find_lines(plan: Plan, rows: BlockRows) -> Lines | None:
    """Search the lines of a block."""
    return choose_lines(rows, plan.settings, torch.Generator().manual_seed(plan.seed))


def attend_sparsely(plan: Plan, rows: BlockRows, lines: Lines) -> Tensor:
    """Attend over a block's lines."""
    return attend(rows, find_places(rows, lines, plan.settings))
