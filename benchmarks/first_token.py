"""First tokens of an open session that names nothing, beside the full cache's.

`OMP_NUM_THREADS=1 python -m benchmarks first-token` holds a conversation in two sessions of one worker:
one keeps the full cache, one names no setting, as a client's that knows nothing of kvrecall. Each begins
with a history of so many tokens. Turns of some lines of a user follow, and each answer is settled in the
pause behind it. The time to a turn's first token is CPU time of the worker's thread, so that other work
on the machine does not count. It is all of it with one thread. The two sessions take turns in going
first. The result file goes to `benchmarks/results/`.
"""

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from secrets import token_bytes
from statistics import median

from benchmarks.benchmark import Benchmark, Measured
from benchmarks.options import option
from benchmarks.settling import open_engine
from evals.replay_session import run_steps
from kvrecall.domain.page_ids import KEY_BYTES
from kvrecall.domain.settings.methods import FULL_CACHE, RECALL
from kvrecall.protocol.v1 import worker_pb2 as pb
from kvrecall_server.reporting.results import Row, speed_row
from reference.conversation import generate
from workers.engine.engine import Engine
from workers.engine.session import ResidentSession
from workers.tasks.settle import run_settle
from workers.tasks.turn import run_turn

FULL, DEFAULT = "full cache", "nothing named"
METHODS = {FULL: FULL_CACHE, DEFAULT: RECALL}
SLOT_ROWS = 8192
# A generated word has more than one token.
_WORDS_PER_TOKEN = 0.75


@dataclass(frozen=True)
class Plan:
    """Sizes of a measurement: tokens of the histories, turns after each, words of a turn."""

    seed: int = 7300
    histories: tuple[int, ...] = (2000, 6000)
    turns: int = 8
    words: int = option(150, "words of the user in a turn")
    answer: int = option(24, "tokens of the longest answer")
    block: int = 256
    model: str = "reference"


def measure(plan: Plan) -> Measured:
    """Measure first tokens of both sessions after each history."""
    return Measured("first-token.json", plan.model, compare(plan), plan.seed)


def compare(plan: Plan) -> Iterator[Row]:
    """Rows of each history."""
    with tempfile.TemporaryDirectory(prefix="kvrecall-first-token-") as folder:
        engine = open_engine(plan.model, plan.block, Path(folder), slots=len(METHODS))
        for number, history in enumerate(plan.histories):
            yield from build_rows(history, time_turns(engine, plan, history, plan.seed + number))
        engine.close()
        engine.store.close()


def time_turns(engine: Engine, plan: Plan, history: int, seed: int) -> dict[str, list[float]]:
    """Measure the turns after a history: CPU seconds to the first token, by arm."""
    texts = read_texts(seed, history, plan)
    arms = {name: open_session(engine, name) for name in METHODS}
    said = next(texts)
    for resident in arms.values():
        run_timed(engine, resident, said, plan.answer)
    times: dict[str, list[float]] = {name: [] for name in METHODS}
    for turn in range(plan.turns):
        said = next(texts)
        for name in list(METHODS)[:: 1 if turn % 2 else -1]:
            run_steps(engine, arms[name], run_settle(engine, arms[name]))
            times[name].append(run_timed(engine, arms[name], said, plan.answer))
    for resident in arms.values():
        engine.unload(resident.session.name).result()
    return times


def read_texts(seed: int, history: int, plan: Plan) -> Iterator[str]:
    """Yield a user's text of the history's length, then those of the turns."""
    tokens = 2 * history + 8 * plan.turns * plan.words
    exchanges = generate(seed, tokens, split="held_out").exchanges
    lines = iter([each.user for each in exchanges if each.tool_call is None])
    for words in (int(history * _WORDS_PER_TOKEN), *[plan.words] * plan.turns):
        text = ""
        while len(text.split()) < words:
            text = f"{text} {next(lines)}"
        yield text.strip()


def open_session(engine: Engine, name: str) -> ResidentSession:
    """Open the session of an arm; one that names nothing has a budget that follows its length."""
    spec = pb.SessionSpec(
        session=name.replace(" ", "-"),
        epoch=1,
        row_key=token_bytes(KEY_BYTES),  # it finds no pages of another
        budget=SLOT_ROWS if name == FULL else 0,
        method=METHODS[name],
        method_settings="{}",
        seed=1,
    )
    return engine.swap_in(engine.open(spec, pb.SessionState()))


def run_timed(engine: Engine, resident: ResidentSession, text: str, answer: int) -> float:
    """Run a turn; return the CPU seconds to its first token."""
    first = list[float]()

    def note(event: pb.TurnEvent) -> None:
        if event.HasField("token") and not first:
            first.append(time.thread_time())

    request = pb.TurnRequest(
        session=resident.session.name,
        epoch=1,
        messages=[pb.Message(role="user", content=text)],
        generate=True,
        sampling=pb.Sampling(max_tokens=answer),
    )
    began = time.thread_time()
    run_steps(engine, resident, run_turn(engine, resident, request, note))
    return first[0] - began


def build_rows(history: int, times: dict[str, list[float]]) -> list[Row]:
    """The rows of one history; ratios are medians over pairs of the same turn."""
    rows = list[Row]()
    for name, values in times.items():
        pairs = zip(values, times[FULL], strict=True)
        ratio = round(median(one / other for one, other in pairs), 4)
        condition = f"{name}, history of {history} tokens"
        row = speed_row(condition, "first token", "CPU seconds", values, ratio_to=FULL, ratio=ratio)
        rows.append(row)
    return rows


BENCHMARK = Benchmark(
    "first-token", "first tokens of the default beside the full cache", Plan, measure
)
