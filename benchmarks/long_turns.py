"""Turns of a session by its length, up to a million tokens: where their seconds go, and what is in memory.

`python -m benchmarks long-turns` makes a session with recall of each length: a first turn, and then rows that no model
has computed, as random numbers in pages of the row store, since time does not depend on what rows say. A worker
that has none of it in memory resumes it, and holds turns. A process for each length, so that none finds another's
memory. A turn's work is CPU time of the process, which other programs on the machine do not change. The result
file goes to `benchmarks/results/`.
"""

import random
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import torch

from benchmarks.benchmark import BadOptions, Benchmark, Measured
from benchmarks.made_up_copy import make_ids
from benchmarks.options import option
from evals.harness import Loaded, Message
from kvrecall.protocol.convert import chat_to_wire
from kvrecall.protocol.v1 import worker_pb2 as pb
from kvrecall_server.app.models import resolve_model
from kvrecall_server.app.wiring import build_store
from kvrecall_server.reporting.results import Row, speed_row
from reference.conversation import generate
from workers.engine.engine import Engine, Parts
from workers.engine.settings import WorkerSettings
from workers.model.loader import load_model
from workers.model.tokenizer import load_tokenizer
from workers.scheduler.scheduler import Scheduler

# Values by what was measured, and its unit.
Found = Mapping[tuple[str, str], Sequence[float]]

_SESSION = "long"
# Rows that are written at once.
_ROWS_AT_ONCE = 4096


@dataclass(frozen=True)
class Plan:
    """Sizes of a measurement, in tokens, and rows of the budget."""

    seed: int = 8100
    lengths: tuple[int, ...] = option((65_536, 262_144, 1_048_576), "tokens of a session")
    turns: int = option(9, "turns behind the one that resumes it")
    answer: int = option(32, "tokens of an answer")
    budget: int = 256
    threads: int = option(
        1, "threads of the worker: with more, one waits for another on a busy machine"
    )
    model: str = "reference"


def measure(plan: Plan) -> Measured:
    """Measure turns of a session of each length."""
    return Measured(f"long-turns-{plan.model}.json", plan.model, build_rows(plan), plan.seed)


def build_rows(plan: Plan) -> Iterator[Row]:
    """Rows of each length, in their order, each beside the first."""
    first: Found = {}
    for length in plan.lengths:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            found = process.submit(measure_length, plan, length).result()
        first = first or found
        for (metric, unit), values in found.items():
            compared = {
                "ratio": round(median(values) / median(first[metric, unit]), 3),
                "ratio_to": f"{plan.lengths[0]:,} tokens",
            }
            row = speed_row(f"{length:,} tokens", metric, unit, list(values))
            yield row if found is first else {**row, **compared}


def measure_length(plan: Plan, length: int) -> Found:
    """Make a session of so many tokens, resume it, and hold its turns."""
    torch.set_num_threads(plan.threads)
    path = resolve_model(plan.model)
    model = load_model(path)
    loaded = Loaded(model, load_tokenizer(path, model.eos_token_ids))
    said = _draw_messages(plan)
    with tempfile.TemporaryDirectory(prefix="kvrecall-long-") as folder:
        with _open_worker(plan, loaded, Path(folder)) as worker:
            state = _make_session(plan, worker, length, next(said))
        with _open_worker(plan, loaded, Path(folder)) as worker:
            return _hold_turns(plan, worker, state, said)


@contextmanager
def _open_worker(plan: Plan, loaded: Loaded, folder: Path) -> Iterator[Scheduler]:
    store = build_store(loaded.model, folder)
    settings = WorkerSettings(slots=1, max_budget=plan.budget)
    worker = Scheduler(Engine(Parts(loaded.model, loaded.tokenizer, store, settings)))
    try:
        yield worker
    finally:
        worker.close()
        store.close()


def _build_spec(plan: Plan) -> pb.SessionSpec:
    return pb.SessionSpec(
        session=_SESSION,
        epoch=1,
        budget=plan.budget,
        method="icecache",
        method_settings="{}",
        seed=plan.seed,
    )


def _draw_messages(plan: Plan) -> Iterator[Message]:
    """Draw a long first message, and short ones."""
    conversation = generate(plan.seed, 4000, split="held_out")
    lines = [each.user for each in conversation.exchanges]
    yield {"role": "user", "content": " ".join(lines[:16])}
    for line in random.Random(plan.seed).sample(lines[16:], plan.turns + 1):
        yield {"role": "user", "content": line}


def _take_turn(worker: Scheduler, said: Message, tokens: int) -> pb.TurnDone:
    request = pb.TurnRequest(
        session=_SESSION,
        epoch=1,
        messages=[chat_to_wire(dict(said))],
        generate=tokens > 0,
        sampling=pb.Sampling(max_tokens=tokens, min_tokens=tokens),
    )
    return worker.turn(request, lambda _: None).result()


def _make_session(plan: Plan, worker: Scheduler, length: int, said: Message) -> pb.SessionState:
    """Hold a first turn, and write random rows behind its own. Returns the state of it all."""
    worker.open(pb.OpenRequest(spec=_build_spec(plan))).result()
    state = _take_turn(worker, said, 0).state
    store = worker.engine.store
    layout = store.layout
    source = torch.Generator().manual_seed(plan.seed)
    length -= length % layout.page_tokens
    store.truncate(_SESSION, state.length)
    while (begin := store.length(_SESSION)) < length:
        count = min(_ROWS_AT_ONCE, length - begin)
        rows = torch.randn(layout.rows_shape(count), generator=source, dtype=torch.float32)
        ids = make_ids(layout, begin, count)
        store.append(_SESSION, rows.to(layout.dtype), ids)
        state.page_ids += b"".join(ids)
    store.flush(_SESSION)
    state.length = length
    del state.pending[:]
    state.unsettled = 0
    return state


def _hold_turns(
    plan: Plan, worker: Scheduler, state: pb.SessionState, said: Iterator[Message]
) -> Found:
    """Resume a session with a turn of one token, and hold others."""
    began = time.perf_counter()
    worker.open(pb.OpenRequest(spec=_build_spec(plan), state=state)).result()
    done = _take_turn(worker, next(said), 1)
    found = {("resumed to the first token", "seconds"): [time.perf_counter() - began]}
    for message in said:
        wall, work = time.perf_counter(), time.process_time()
        done = _take_turn(worker, message, plan.answer)
        work, wall = time.process_time() - work, time.perf_counter() - wall
        if done.retrieval.refused:
            raise BadOptions(f"no host memory for the rows of {done.memory.length:,} tokens")
        prompt, searched = done.seconds["prefill"], done.retrieval.seconds
        for name, value in {
            ("turn", "CPU seconds"): work,
            ("turn", "seconds"): wall,
            ("its prompt", "seconds"): prompt,
            ("search and attention of its answer", "seconds"): searched,
            ("all else", "seconds"): wall - prompt - searched,
        }.items():
            found.setdefault(name, []).append(value)
        paused = time.perf_counter()
        worker.settle(pb.SettleRequest(session=_SESSION, epoch=1)).result()
        pause = time.perf_counter() - paused
        found.setdefault(("the pause behind it", "seconds"), []).append(pause)
    memory = worker.engine.cache.pool.get_memory(0)
    found["rows and index on the host", "bytes"] = [done.memory.retrieval_bytes]
    found["slot on the device", "bytes"] = [2.0 * memory.keys.nbytes]
    return found


BENCHMARK = Benchmark("long-turns", "turns of sessions of up to a million tokens", Plan, measure)
