"""Settled answers beside answers whose rows stay as they were decoded: distance, answers, work, first token.

`python -m benchmarks settling` holds generated conversations in three sessions of one worker, turn by
turn: one settles with the next turn, one in the pause before it, and one not at all. That one has a
re-selection that never comes due, so that its rows are not known to follow from its tokens. Answers are
sampled with the same seed. At the end each session gets the same recorded exchange, and so does the full
cache over that session's own tokens: their distributions on the reply are compared. The time to the
first token is CPU time of the worker's thread. The result file goes to `benchmarks/results/`.
"""

import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_bytes
from statistics import median
from typing import Any

from benchmarks.benchmark import Benchmark, Measured
from benchmarks.options import option
from evals.codecs import RAW, store_settings
from evals.harness import load
from evals.replay_session import run_steps
from kvrecall.domain.page_ids import KEY_BYTES
from kvrecall.protocol.v1 import worker_pb2 as pb
from kvrecall_server.app.wiring import build_store
from kvrecall_server.reporting.results import Row, bootstrap, quality_row, speed_row
from reference.conversation import Exchange, generate
from workers.engine.engine import Engine, Parts
from workers.engine.session import ResidentSession
from workers.engine.settings import WorkerSettings
from workers.generation.prefill import prefill
from workers.model.tokenizer import Segment
from workers.tasks.settle import run_settle
from workers.tasks.turn import run_turn

PAUSE, TURN, DECODED = "settled in the pause", "settled with the turn", "as decoded"
ARMS = (PAUSE, TURN, DECODED)
FULL = "full"
KL = "KL to the full cache, millionths of a nat"
NEVER = json.dumps({"reselect": {"every": 256, "first": 2**31 - 1}})


@dataclass(frozen=True)
class Plan:
    """Sizes of a measurement: user lines of a turn, tokens of its longest answer, rows of the budget."""

    seed: int = 7300
    conversations: int = 4
    turns: int = 8
    lines: int = option(6, "lines of the user in a turn")
    answer: int = option(32, "tokens of the longest answer")
    budget: int = 128
    block: int = 256
    temperature: float = 0.7
    model: str = "reference"


@dataclass
class Arm:
    """One session of a conversation: its tokens so far."""

    name: str
    resident: ResidentSession
    token_ids: list[int] = field(default_factory=list)


Measurements = dict[str, dict[str, list[float]]]


def measure(plan: Plan) -> Measured:
    """Measure conversations whose answers are settled, or stay as they were decoded."""
    return Measured("settling.json", plan.model, compare_arms(plan), plan.seed)


def compare_arms(plan: Plan) -> Iterator[Row]:
    """Rows of all arms, after all conversations."""
    measured: Measurements = {arm: defaultdict(list) for arm in ARMS}
    with tempfile.TemporaryDirectory(prefix="kvrecall-settling-") as folder:
        engine = open_engine(plan.model, plan.block, Path(folder), slots=len(ARMS) + 1)
        for number in range(plan.conversations):
            hold(engine, plan, plan.seed + number, measured)
            print(f"conversation {number + 1} of {plan.conversations}", flush=True)
        engine.close()
        engine.store.close()
    yield from build_rows(measured, plan)


def open_engine(model: str, block: int, folder: Path, slots: int) -> Engine:
    """Open an engine whose slots hold a whole conversation."""
    loaded = load(model)
    store = build_store(loaded.model, folder, tiers=store_settings(RAW))
    limits = WorkerSettings(slots=slots, max_budget=8192, block_tokens=block)
    return Engine(Parts(loaded.model, loaded.tokenizer, store, limits))


def hold(engine: Engine, plan: Plan, seed: int, measured: Measurements) -> None:
    """Hold one conversation in all arms, and compare each with the full cache."""
    conversation = generate(seed, 60 * plan.turns * plan.lines, split="held_out")
    exchanges = [each for each in conversation.exchanges if each.tool_call is None]
    arms = [open_arm(engine, plan, name, seed) for name in ARMS]
    for turn in range(plan.turns):
        lines = exchanges[turn * plan.lines : (turn + 1) * plan.lines]
        # The first arm of a turn finds colder caches of the processor.
        for arm in arms[turn % len(arms) :] + arms[: turn % len(arms)]:
            run_arm_turn(engine, plan, arm, lines, seed + turn, measured[arm.name])
    for arm in arms:
        reply = exchanges[plan.turns * plan.lines]
        fidelity = compare(engine, arm, reply)
        measured[arm.name][KL].append(1e6 * fidelity.kl_mean)
        measured[arm.name]["same first choice"].append(fidelity.top1_agreement)
    for name in (*ARMS, FULL):
        engine.unload(name).result()


def open_arm(engine: Engine, plan: Plan, name: str, seed: int) -> Arm:
    """Open the session of an arm."""
    spec = pb.SessionSpec(
        session=name,
        epoch=1,
        row_key=token_bytes(KEY_BYTES),  # it finds no pages of another
        budget=plan.budget,
        method="icecache",
        method_settings="{}",
        seed=seed,
        options=NEVER if name == DECODED else "",
    )
    return Arm(name, engine.swap_in(engine.open(spec, pb.SessionState())))


def run_arm_turn(
    engine: Engine,
    plan: Plan,
    arm: Arm,
    lines: Sequence[Exchange],
    seed: int,
    measured: dict[str, list[float]],
) -> None:
    """Run a turn of one arm, and what comes in the pause before it."""
    if arm.name == PAUSE:
        settled = run_steps(engine, arm.resident, run_settle(engine, arm.resident))
        measured["tokens settled in the pause"].append(settled.settled_tokens)
    first = list[float]()

    def note(event: pb.TurnEvent) -> None:
        if event.HasField("token"):
            first.append(time.thread_time())

    message = pb.Message(role="user", content=" ".join(line.user for line in lines))
    sampling = pb.Sampling(max_tokens=plan.answer, temperature=plan.temperature, seed=seed)
    request = pb.TurnRequest(
        session=arm.name, epoch=1, messages=[message], generate=True, sampling=sampling
    )
    began = time.thread_time()
    done = run_steps(engine, arm.resident, run_turn(engine, arm.resident, request, note))
    if arm.token_ids and first:  # the session is warm
        measured["first token"].append(first[0] - began)
        measured["tokens before the answer"].append(done.prefilled_tokens)
    if lines[-1].answer is not None:
        measured["right answers"].append(lines[-1].is_answered_by(done.message.content))
    arm.token_ids += done.token_ids


def compare(engine: Engine, arm: Arm, exchange: Exchange) -> pb.Fidelity:
    """Compare an arm's distribution on a recorded reply with the full cache's."""
    spec = pb.SessionSpec(session=FULL, epoch=1, budget=8192, method="full", method_settings="{}")
    known = engine.sessions.get(FULL)
    spec.epoch = 1 if known is None else known.config.epoch + 1
    full = engine.swap_in(engine.open(spec, pb.SessionState()))
    pages = len(arm.token_ids) - len(arm.token_ids) % engine.store.layout.page_tokens
    steps = prefill(
        engine,
        full,
        [Segment(tuple(arm.token_ids[:pages]), recorded=False)],
        keep_distribution=False,
        on_prompt_end=lambda: None,
    )
    run_steps(engine, full, steps)
    full.session.pending = arm.token_ids[pages:]  # as every session between two turns
    full.session.recent = list(arm.resident.session.recent)
    said = [
        pb.Message(role="user", content=exchange.user),
        pb.Message(role="assistant", content=exchange.reply),
    ]
    kept = pb.TurnRequest(session=FULL, epoch=spec.epoch, messages=said, keep_distribution=True)
    run_steps(engine, full, run_turn(engine, full, kept, lambda _: None))
    compared = pb.TurnRequest(session=arm.name, epoch=1, messages=said, compare_with=FULL)
    done = run_steps(engine, arm.resident, run_turn(engine, arm.resident, compared, lambda _: None))
    return done.fidelity


def build_rows(measured: Measurements, plan: Plan) -> list[Row]:
    """The result file's rows."""
    common: dict[str, Any] = {"method": "icecache", "budget": plan.budget}
    rows = list[Row]()
    for arm in ARMS:
        for metric in (KL, "same first choice", "right answers"):
            found = bootstrap([float(value) for value in measured[arm][metric]], plan.seed)
            if found is not None:
                rows.append(quality_row(arm, found, metric=metric, **common))
        for metric in ("tokens before the answer", "tokens settled in the pause"):
            if values := measured[arm][metric]:
                mean = round(sum(values) / len(values), 1)
                rows.append({"condition": arm, "metric": metric, "mean": mean, "n": len(values)})
        values = measured[arm]["first token"]
        pairs = zip(values, measured[DECODED]["first token"], strict=True)
        ratio = round(median(one / other for one, other in pairs), 4)
        rows.append(
            speed_row(
                arm, "first token", "CPU seconds", values, ratio_to=DECODED, ratio=ratio, **common
            )
        )
    return rows


BENCHMARK = Benchmark("settling", "what settling answers in a pause costs and keeps", Plan, measure)
