"""A worker of two ranks beside workers of one process, on the same cores.

`python -m benchmarks ranks` holds the same conversation in three workers: two are single processes with two threads,
one has two ranks with a thread each (`kvrecall worker --tensor-parallel 2`). In each of them one session keeps the
full cache and one has the default method with a budget. They take their turns one after the other, and which is
first changes from turn to turn. Ranks decode layer by layer, so they are compared with a process that does so as well;
a third worker decodes by native steps, as a process without ranks does.

`--model made-up` is a random Llama of 140 M weights, `reference` the packaged model. SmolLM2 has 3 KV heads, which
two ranks cannot divide. A machine needs as many idle cores as `--ranks`.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from transformers import AutoConfig, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from benchmarks import throughput
from benchmarks.benchmark import BadOptions, Benchmark, Measured
from benchmarks.options import option
from benchmarks.ranks.arm import Arm, start_arm
from benchmarks.ranks.program import DEFAULT, FULL
from benchmarks.ranks.sizes import Sizes
from benchmarks.subjects import Timed
from kvrecall_server.app.models import resolve_model
from kvrecall_server.reporting.results import Row, speed_row
from reference import MODEL_PATH
from workers.errors import ModelRefused
from workers.model.division import build_arguments

MADE_UP = "made-up"
MEASURES: tuple[tuple[str, Callable[[Timed], float]], ...] = (
    ("prefill", lambda turn: turn.prompt_tokens / turn.first_token),
    ("decode", lambda turn: (turn.output_tokens - 1) / turn.decode),
)


@dataclass(frozen=True)
class Plan:
    """Sizes of a measurement: numbers of tokens, `budget` in rows."""

    seed: int = 4900
    model: str = option("reference", f"reference, {MADE_UP}, a folder or a hub name")
    ranks: int = option(2, "processes of one worker; the other has so many threads")
    turns: int = 13
    turn_tokens: int = option(400, "tokens of a user's message")
    output_tokens: int = 64
    budget: int = option(512, "rows of the session with the default method")
    block: int = 256

    @property
    def longest(self) -> int:
        """Upper bound on the tokens of a session."""
        return 2 * self.turns * (self.turn_tokens + self.output_tokens)


def measure(plan: Plan) -> Measured:
    """Measure the workers. Raises BadOptions for too few turns, and for a model that ranks cannot divide."""
    if plan.ranks < 2 or plan.turns < 2 or plan.output_tokens < 2:
        raise BadOptions("expected 2 ranks, 2 turns and 2 tokens of an answer, or more")
    if plan.model != MADE_UP:
        try:
            build_arguments(AutoConfig.from_pretrained(resolve_model(plan.model)), plan.ranks)
        except ModelRefused as error:
            raise BadOptions(str(error)) from error
    return Measured(
        f"ranks-{Path(plan.model).name}.json",
        Path(plan.model).name,
        compare(plan),
        plan.seed,
        machine={"threads": plan.ranks},
    )


def compare(plan: Plan) -> Iterator[Row]:
    """Rows of each method, as soon as all workers have taken all turns."""
    with tempfile.TemporaryDirectory(prefix="kvrecall-ranks-") as name, ExitStack() as stack:
        folder = Path(name)
        model = str(
            make_model(folder, plan.seed) if plan.model == MADE_UP else resolve_model(plan.model)
        )
        alone, native, divided = name_arms(plan.ranks)
        arms = {}
        for arm, ranks in ((alone, 1), (native, 1), (divided, plan.ranks)):
            threads, steps = plan.ranks // ranks, arm == native
            sizes = Sizes(model, threads, plan.budget, plan.longest, plan.block, steps)
            arms[arm] = stack.enter_context(start_arm(ranks, folder / arm, sizes))
        times = take_turns(arms, plan)
        for method in (FULL, DEFAULT):
            yield from build_rows(method, {arm: times[method, arm] for arm in arms}, alone)


def name_arms(ranks: int) -> tuple[str, str, str]:
    """Name the worker of one process, that with native steps, and that of ranks."""
    alone = f"one process, {ranks} threads"
    return alone, f"{alone}, native steps", f"{ranks} ranks, 1 thread each"


def take_turns(arms: dict[str, Arm], plan: Plan) -> dict[tuple[str, str], list[Timed]]:
    """Take all turns, by method and worker; the first one warms up and is not counted."""
    conversation = throughput.Plan(seed=plan.seed, turns=plan.turns, turn_tokens=plan.turn_tokens)
    times: dict[tuple[str, str], list[Timed]] = {}
    for number, text in enumerate(throughput.build_texts(conversation)):
        for method in (FULL, DEFAULT):
            for arm in list(arms)[:: 1 if number % 2 else -1]:
                timed = arms[arm].turn(method, text, plan.output_tokens)
                if number:
                    times.setdefault((method, arm), []).append(timed)
    return times


def build_rows(method: str, times: dict[str, list[Timed]], alone: str) -> Iterator[Row]:
    """The rows of a method; ratios are medians over pairs of the same turn."""
    for metric, value in MEASURES:
        found = {arm: [value(timed) for timed in each] for arm, each in times.items()}
        for arm, values in found.items():
            pairs = zip(values, found[alone], strict=True)
            ratio = round(median(one / other for one, other in pairs), 3)
            compared = {} if arm == alone else {"ratio_to": alone, "ratio": ratio}
            yield speed_row(f"{method}: {arm}", metric, "tokens per second", values, **compared)


def make_model(folder: Path, seed: int) -> Path:
    """Save a random Llama of 140 M weights with the packaged model's tokenizer; returns its folder."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL_PATH)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=131_072,
    )
    LlamaForCausalLM(config).save_pretrained(folder / MADE_UP)
    tokenizer.save_pretrained(folder / MADE_UP)
    return folder / MADE_UP


BENCHMARK = Benchmark(
    "ranks", "a worker of two ranks beside one of a single process", Plan, measure
)
