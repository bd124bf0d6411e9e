"""A turn of a hybrid beside a turn of a dense model of the same size, in the service and without it.

`OMP_NUM_THREADS=1 python -m benchmarks hybrid` builds two random models with as many parameters: one of delta
nets and full attention in the proportions of Qwen3.5, and a dense one. A session of each runs turns of so
many prompt tokens and an answer, through the service's engine with files, the pause before the turn
included. Then transformers alone runs the same passes, so that what is left is the service's own work.
Models take turns in going first. Times are CPU time of the process. The result file goes to
`benchmarks/results/`.
"""

import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from benchmarks.benchmark import Benchmark, Measured
from benchmarks.hybrid.arm import (
    AGAIN,
    BESIDE,
    COMPUTED,
    COPIES,
    OVERHEAD,
    PLAIN,
    RATIO,
    ROW_BYTES,
    SERVICE,
    STATE_BYTES,
    STATES,
    SWAP,
    WRITES,
    Arm,
)
from benchmarks.hybrid.models import DENSE, HYBRID, build_models, count_parameters
from benchmarks.options import option
from benchmarks.subjects import without_end_of_turn
from kvrecall_server.reporting.results import Row, speed_row
from reference import MODEL_PATH
from workers.model.loader import adopt
from workers.model.tokenizer import load_tokenizer

UNITS = {
    SERVICE: "CPU seconds",
    PLAIN: "CPU seconds",
    OVERHEAD: "CPU seconds",
    RATIO: "ratio",
    BESIDE: "CPU seconds",
    COPIES: "CPU seconds",
    WRITES: "CPU seconds",
    SWAP: "CPU seconds",
    COMPUTED: "tokens",
    AGAIN: "tokens",
    STATES: "states",
    STATE_BYTES: "bytes",
    ROW_BYTES: "bytes",
}
# Slots hold every row: what retrieval takes is not measured here.
METHOD = "full"
_WARM = 1
# Differences have no ratio: they may be next to nothing.
_COMPARED = (SERVICE, PLAIN, SWAP)
Found = dict[str, dict[str, list[float]]]


@dataclass(frozen=True)
class Plan:
    """Sizes of a measurement."""

    seed: int = 3500
    prompts: tuple[int, ...] = option((256, 512, 1024), "tokens of a turn's prompt")
    answer: int = option(32, "tokens of an answer")
    sessions: int = option(4, "sessions of each model and length of a prompt")
    turns: int = option(3, "turns of each session that are measured, behind one that is not")
    hidden: int = option(512, "width of the models, a multiple of 256")


def measure(plan: Plan) -> Measured:
    """Measure turns of both models."""
    model = f"random hybrid and dense model of 8 layers, width {plan.hidden}"
    return Measured("hybrid.json", model, compare(plan), plan.seed)


def compare(plan: Plan) -> Iterator[Row]:
    """Rows of each size of a prompt."""
    random = torch.Generator().manual_seed(plan.seed)
    with ExitStack() as stack:
        arms = open_arms(stack, plan)
        vocabulary = arms[DENSE].engine.model.vocabulary
        for prompt in plan.prompts:
            found: Found = {name: defaultdict(list) for name in arms}
            for session in range(plan.sessions):
                for name, arm in arms.items():
                    arm.begin(f"{name}-{prompt}-{session}", METHOD)
                for turn in range(_WARM + plan.turns):
                    tokens = torch.randint(10, vocabulary, (prompt,), generator=random).tolist()
                    run_turn(list(arms.values())[:: -1 if turn % 2 else 1], tokens, plan.answer)
                for name, arm in arms.items():
                    arm.finish()
                    for metric, values in arm.found.items():
                        found[name][metric] += values[_WARM:]
            yield from build_rows(prompt, plan, found)
        yield from size_rows(arms)


def open_arms(stack: ExitStack, plan: Plan) -> dict[str, Arm]:
    """Open both models; the stack closes them."""
    tokenizer = load_tokenizer(MODEL_PATH, ())
    rows = (_WARM + plan.turns) * (max(plan.prompts) + plan.answer + 1)
    arms = {}
    for name, module in build_models(plan.hidden, len(tokenizer.inner), plan.seed).items():
        plain = deepcopy(module)
        plain.set_attn_implementation("sdpa")
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"kvrecall-{name}-")))
        served = without_end_of_turn(adopt(module), tokenizer)
        arms[name] = Arm(stack, folder, *served, plain, rows)
    return arms


def run_turn(arms: Sequence[Arm], prompt: Sequence[int], answer: int) -> None:
    """Run a turn of each model with the service, then without."""
    for arm in arms:
        arm.run_service(prompt, answer)
    for arm in arms:
        arm.run_plain()
    for arm in arms:
        arm.swap()


def build_rows(prompt: int, plan: Plan, found: Found) -> list[Row]:
    """The rows of one size; ratios are medians over pairs of the same turn."""
    rows = list[Row]()
    for name, metrics in found.items():
        condition = f"{name}, {prompt} + {plan.answer} tokens"
        for metric, unit in UNITS.items():
            values = metrics.get(metric, [])
            if not values:
                continue
            ratio = {}
            if name == HYBRID and metric in _COMPARED:
                pairs = zip(values, found[DENSE][metric], strict=True)
                ratio = {
                    "ratio_to": DENSE,
                    "ratio": round(median(one / other for one, other in pairs), 3),
                }
            rows.append(speed_row(condition, metric, unit, values, method=METHOD, **ratio))
    return rows


def size_rows(arms: Mapping[str, Arm]) -> Iterator[Row]:
    """Rows of the models' sizes."""
    for name, arm in arms.items():
        engine = arm.engine
        sizes = {
            "parameters": float(count_parameters(engine.model.module)),
            "row bytes of a token": float(engine.store.layout.token_bytes),
            "bytes of a state": float(engine.model.state_bytes),
        }
        for metric, size in sizes.items():
            if size:
                unit = "" if metric == "parameters" else "bytes"
                yield speed_row(name, metric, unit, [size])


BENCHMARK = Benchmark("hybrid", "turns of a model with states beside a dense one", Plan, measure)
