"""Prefill and decode speed, seconds to the first token and memory of a long session, compared.

`python -m benchmarks throughput` measures the packaged model; with `--shape large` a random Llama
of 1 B parameters, which needs a GPU. `--of re-selection` measures the decoding of answers that
select their rows anew every 2 and 16 tokens beside the same answers without, after 4,096 tokens.
Everything is measured in one process, turn by turn in rotation, so that disturbances of the machine
affect all subjects alike. The result file goes to `benchmarks/results/`.
"""

import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.benchmark import Benchmark, Measured
from benchmarks.options import option
from benchmarks.subjects import (
    Clock,
    KvrecallChat,
    Subject,
    Timed,
    TransformersChat,
    Worker,
    copy_plain,
    kvrecall_batch_speed,
    transformers_batch_speed,
    without_end_of_turn,
)
from kvrecall_server.reporting.results import Row, speed_row
from reference import MODEL_PATH
from reference.conversation import generate
from workers.engine.settings import WorkerSettings
from workers.model.loader import LoadedModel, adopt, load_model
from workers.model.tokenizer import ChatTokenizer, load_tokenizer

BASELINE = "transformers, cache kept"
REPEATS = 3
RESELECTION_PAIRS = 12
RESELECTION_CONTEXT = 4096
RESELECTION_TOKENS = 130
RESELECTION_BUDGETS = (256, 1024)
RESELECTION_INTERVALS = (2, 16)


@dataclass(frozen=True)
class Plan:
    """Sizes of a measurement: numbers of tokens, `budget` in rows."""

    seed: int = 0
    turns: int = 24
    turn_tokens: int = option(250, "tokens of a user's message")
    output_tokens: int = 48
    budget: int = 256
    block: int = 128
    batch_context: int = option(2048, "tokens of context before a batch decodes")
    shape: str = option("reference", choices=("reference", "large"))
    of: str = option("sessions", choices=("sessions", "re-selection"))

    @property
    def longest(self) -> int:
        """Upper bound on the tokens of a session."""
        return 2 * max(
            self.turns * (self.turn_tokens + self.output_tokens),
            self.batch_context + self.output_tokens,
        )


def measure(plan: Plan) -> Measured:
    """Measure a long session and batches, or answers with re-selection."""
    model, tokenizer = load(plan.shape, plan.seed)
    what = "" if plan.of == "sessions" else f"{plan.of}-"
    measures = {"sessions": measure_sessions, "re-selection": measure_reselection}
    return Measured(
        f"throughput-{what}{plan.shape}-{model.device.type}.json",
        f"{plan.shape} ({describe_model(model)})",
        measures[plan.of](model, tokenizer, plan),
        plan.seed,
    )


def load(shape: str, seed: int) -> tuple[LoadedModel, ChatTokenizer]:
    """The packaged model, or a random one of a usual size, on a GPU if there is one."""
    model = load_model(MODEL_PATH)
    tokenizer = load_tokenizer(MODEL_PATH, model.eos_token_ids)
    if shape == "large":
        model = random_llama(len(tokenizer.inner), seed)
    return without_end_of_turn(model, tokenizer)


def random_llama(vocabulary: int, seed: int) -> LoadedModel:
    """A Llama of 1 B random bfloat16 parameters with the packaged model's vocabulary."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131_072,
        dtype="bfloat16",
    )
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        module = LlamaForCausalLM(config)
    nn.Module.to(module, torch.bfloat16)
    return adopt(module)


def measure_sessions(model: LoadedModel, tokenizer: ChatTokenizer, plan: Plan) -> list[Row]:
    """Rows of the long session, then those of batches."""
    theirs = copy_plain(model)
    rows = []
    with open_subjects(model, theirs, tokenizer, plan) as subjects:
        rows += session_rows(subjects, plan)
    rows += batch_rows(model, theirs, tokenizer, plan)
    return rows


@contextmanager
def open_subjects(
    model: LoadedModel, theirs: Any, tokenizer: ChatTokenizer, plan: Plan
) -> Iterator[list[Subject]]:
    """The four subjects that are compared."""
    with (
        tempfile.TemporaryDirectory() as folder,
        open_worker(model, tokenizer, Path(folder) / "full", plan, 1) as full,
        open_worker(model, tokenizer, Path(folder) / "small", plan, 1, plan.budget) as small,
    ):
        yield [
            TransformersChat(BASELINE, theirs, tokenizer, keep_cache=True),
            TransformersChat(
                "transformers, prefilled every turn", theirs, tokenizer, keep_cache=False
            ),
            KvrecallChat("kvrecall, full", full, "full", plan.budget),
            KvrecallChat(f"kvrecall, budget {plan.budget}", small, "snapkv", plan.budget),
        ]


@contextmanager
def open_worker(
    model: LoadedModel,
    tokenizer: ChatTokenizer,
    data: Path,
    plan: Plan,
    slots: int,
    rows: int | None = None,
) -> Iterator[Worker]:
    """A worker with `slots` slots of `rows` rows, by default of the longest session."""
    settings = WorkerSettings(slots=slots, max_budget=rows or plan.longest, block_tokens=plan.block)
    worker = Worker.start(model, tokenizer, data, settings)
    try:
        yield worker
    finally:
        worker.close()


def session_rows(subjects: Sequence[Subject], plan: Plan) -> list[Row]:
    """Rows of a long session in every subject, turn by turn in rotation."""
    texts = build_texts(plan)
    times: dict[str, list[Timed]] = {subject.name: [] for subject in subjects}
    for subject in subjects:
        subject.turn(texts[0], plan.output_tokens)  # the first turn warms up and is not counted
    for text in texts[1:]:
        for subject in subjects:
            times[subject.name].append(subject.turn(text, plan.output_tokens))
    measures: list[tuple[str, str, Callable[[Timed], float]]] = [
        ("time to first token", "seconds", lambda turn: turn.first_token),
        ("prefill", "new tokens per second", lambda turn: turn.prompt_tokens / turn.first_token),
        ("decode", "tokens per second", lambda turn: (turn.output_tokens - 1) / turn.decode),
    ]
    condition = f"session of {plan.turns} turns"
    rows: list[Row] = []
    for metric, unit, value in measures:
        values = {name: [value(turn) for turn in each] for name, each in times.items()}
        rows += speed_rows(condition, metric, unit, values, BASELINE)
    held = {subject.name: [float(subject.cache_bytes())] for subject in subjects}
    return [*rows, *speed_rows(condition, "cache at the end", "bytes", held, BASELINE)]


def build_texts(plan: Plan) -> list[str]:
    """User messages of about `turn_tokens` tokens each, a function of the seed."""
    conversation = generate(plan.seed, 20_000, split="held_out")
    lines = [exchange.user for exchange in conversation.exchanges]
    rng = random.Random(plan.seed)
    per_turn = max(1, plan.turn_tokens // 14)  # a generated line has about 14 tokens
    return [" ".join(rng.choices(lines, k=per_turn)) for _ in range(plan.turns)]


def batch_rows(model: LoadedModel, theirs: Any, tokenizer: ChatTokenizer, plan: Plan) -> list[Row]:
    """Rows of decoding 1, 2 and 4 sessions at once, each with its own context."""
    values: dict[int, dict[str, list[float]]] = {}
    text = " ".join(build_texts(plan))
    ids = torch.tensor(tokenizer.encode(text)[: plan.batch_context])
    context = str(tokenizer.inner.decode(ids))
    tokens = plan.output_tokens
    for batch in (1, 2, 4):
        transformers_batch_speed(theirs, ids.expand(batch, -1), 2)  # warm
        values[batch] = {
            "transformers": [
                transformers_batch_speed(theirs, ids.expand(batch, -1), tokens)
                for _ in range(REPEATS)
            ]
        }
        for name, method, rows in (
            ("kvrecall, full", "full", None),
            ("kvrecall, budget", "snapkv", plan.budget),
        ):
            with (
                tempfile.TemporaryDirectory() as folder,
                open_worker(model, tokenizer, Path(folder), plan, batch, rows) as worker,
            ):
                sessions = [f"session {index}" for index in range(batch)]
                for session in sessions:
                    worker.open(session, method, plan.budget)
                    worker.append(session, context)
                kvrecall_batch_speed(worker, sessions, 2)  # warm
                values[batch][name] = [
                    kvrecall_batch_speed(worker, sessions, tokens) for _ in range(REPEATS)
                ]
    return [
        row
        for batch, by_subject in values.items()
        for row in speed_rows(
            f"{batch} at once after {len(ids)} tokens",
            "decode",
            "tokens per second",
            by_subject,
            "transformers",
        )
    ]


def measure_reselection(model: LoadedModel, tokenizer: ChatTokenizer, plan: Plan) -> list[Row]:
    """Rows of decoding with and without re-selections, in pairs, the order changing by turns."""
    text = " ".join(build_texts(replace(plan, turns=40)))
    context = str(tokenizer.inner.decode(tokenizer.encode(text)[:RESELECTION_CONTEXT]))
    rows = list[Row]()
    slots = 1 + len(RESELECTION_INTERVALS)
    for budget in RESELECTION_BUDGETS:
        with (
            tempfile.TemporaryDirectory() as folder,
            open_worker(model, tokenizer, Path(folder), plan, slots, budget) as worker,
        ):
            found = time_reselection(worker, context, budget)
        condition = f"answer after {RESELECTION_CONTEXT} tokens, budget {budget}"
        for clock, values in found.items():
            rows += speed_rows(condition, "decode", f"tokens per {clock}", values, "never")
    return rows


def time_reselection(
    worker: Worker, context: str, budget: int
) -> dict[str, dict[str, list[float]]]:
    """Speed of the same turn, again and again from one state, with and without.

    In tokens per second, and per second of CPU time, which other work on the machine changes less.
    """
    settings = {"never": f'{{"first": {2**31 - 1}}}'}
    counts = {"never": 0}
    for every in RESELECTION_INTERVALS:
        settings[f"every {every} tokens"] = f'{{"every": {every}}}'
        # Before every token that is fed: all but the last.
        counts[f"every {every} tokens"] = len(range(0, RESELECTION_TOKENS - 1, every))
    states = {}
    for name, chosen in settings.items():
        worker.open(name, "loopserve", budget, chosen)
        states[name] = worker.append(name, context).state
    clocks = ("second", "CPU second")
    found: dict[str, dict[str, list[float]]] = {
        clock: {name: [] for name in settings} for clock in clocks
    }
    for pair in range(RESELECTION_PAIRS + 1):
        for name in sorted(settings, reverse=bool(pair % 2)):
            worker.open(name, "loopserve", budget, settings[name], states[name])
            clock = Clock()
            began = time.process_time()
            done = worker.ask(name, "Go on.", RESELECTION_TOKENS, clock).result()
            used = time.process_time() - began
            assert done.reselections.count == counts[name], "the answer re-selects as it should"
            timed = clock.timed(done.prompt_tokens)
            if pair:  # the first one warms up
                found["second"][name].append((timed.output_tokens - 1) / timed.decode)
                found["CPU second"][name].append(timed.output_tokens / used)
    return found


def speed_rows(
    condition: str, metric: str, unit: str, values: dict[str, list[float]], baseline: str
) -> Iterator[Row]:
    """One row per subject with its ratio to the baseline's median."""
    base = median(values[baseline])
    for name, found in values.items():
        ratio = (
            {"ratio_to": baseline, "ratio": round(median(found) / base, 3)}
            if name != baseline and base
            else {}
        )
        yield speed_row(f"{condition}: {name}", metric, unit, found, **ratio)


def describe_model(model: LoadedModel) -> str:
    """Size of a model as text."""
    parameters = sum(weight.numel() for weight in model.module.parameters())
    shape = model.shape
    return f"{parameters / 1e6:.1f} M parameters, {shape.n_layers} layers, {model.dtype}".replace(
        "torch.", ""
    )


BENCHMARK = Benchmark("throughput", "prefill, decode and memory of a long session", Plan, measure)
