"""Repairs in an agent's tool pauses: the share that ends in time, and the cost to the next turn.

`python -m benchmarks pauses` runs one agent conversation in two sessions of a real service over
HTTP, one with repairs and one without, step by step in turn: a turn that calls a tool, a pause, the
tool's result at a share of the pause, and the turn with the result, whose first token is timed.
Both sessions get the same messages and have the same budget. A repair counts as ended in its pause
if it ended before the next turn was sent; those that the turn stopped early, and those that were
due and not started, count against it. The result file goes to `benchmarks/results/`.
"""

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from statistics import median
from typing import Any

from benchmarks.benchmark import Benchmark, Measured
from benchmarks.options import option
from kvrecall.client import KvrecallClient, Repair, Turn
from kvrecall_server.app.local.server import ServerNeeds, server_at
from kvrecall_server.app.models import REFERENCE_NAME
from kvrecall_server.reporting.results import Row, bootstrap, quality_row, speed_row
from reference import MODEL_PATH
from reference.conversation import Conversation, Exchange, exchange_messages, generate

REPAIR = "repair"
NO_REPAIR = "no repair"
SIGNALS = ("tool_call", "tool_delta", "tool_result")
MESSAGES_PER_TURN = 64
WARM_STEPS = 2


@dataclass(frozen=True)
class Plan:
    """Sizes of a measurement.

    `budget` and `repair_rows` are rows, `shortest` and `longest` seconds of a pause, `result_at`
    the share of a pause after which the result is there.
    """

    seed: int = 7100
    tokens: int = option(4000, "tokens before the first pause")
    steps: int = option(60, "pauses of each session")
    budget: int = 256
    repair_rows: int = 64
    method: str = "snapkv"
    shortest: float = option(0.2, "seconds of the shortest pause")
    longest: float = option(2.0, "seconds of the longest pause")
    result_at: float = option(0.5, "share of a pause after which the result is there")


@dataclass
class Side:
    """One of the two sessions with its measurements."""

    name: str
    session: str
    first_tokens: list[float] = field(default_factory=list)
    in_service: list[float] = field(default_factory=list)
    repairs: list[Repair] = field(default_factory=list)
    left_out: int = 0


def measure(plan: Plan) -> Measured:
    """Measure a conversation with and without repairs."""

    def rows() -> Iterator[Row]:
        needs = ServerNeeds(model=str(MODEL_PATH), slots=2, max_budget=plan.budget)
        with server_at(None, needs) as url, KvrecallClient(url) as client:
            yield from build_rows(run_conversation(client, plan), plan)

    return Measured("pauses.json", REFERENCE_NAME, rows(), plan.seed)


def run_conversation(client: KvrecallClient, plan: Plan) -> tuple[Side, Side]:
    """Run the whole conversation in both sessions; the first steps warm up and are not counted."""
    conversation = generate(plan.seed, plan.tokens, split="held_out")
    sides = (
        open_session(client, plan, conversation, REPAIR),
        open_session(client, plan, conversation, NO_REPAIR),
    )
    with_calls = [exchange for exchange in conversation.exchanges if exchange.tool_call is not None]
    rng = random.Random(plan.seed)
    for number, exchange in enumerate(islice(cycle(with_calls), WARM_STEPS + plan.steps)):
        pause = rng.uniform(plan.shortest, plan.longest)
        for side in rng.sample(sides, len(sides)):
            turn, seconds = run_step(
                client, side.session, exchange, f"step {number}", pause, plan.result_at
            )
            if number >= WARM_STEPS:
                add_measurements(side, turn, seconds)
    return sides


def open_session(client: KvrecallClient, plan: Plan, conversation: Conversation, name: str) -> Side:
    """A new session with the conversation appended, without its tool calls.

    Both sessions have the same budget and repair rows.
    """
    session = client.create_session(
        research={
            "method": plan.method,
            "repair_rows": plan.repair_rows,
            "repair_on": list(SIGNALS) if name == REPAIR else [],
        },
        budget=plan.budget,
        seed=plan.seed,
        tools=conversation.tools,
    ).id
    messages = [{"role": "system", "content": conversation.system}]
    for number, exchange in enumerate(conversation.exchanges):
        if exchange.tool_call is None:
            messages += exchange_messages(exchange, f"call {number}")
    for start in range(0, len(messages), MESSAGES_PER_TURN):
        client.turn(session, messages[start : start + MESSAGES_PER_TURN], generate=False)
    return Side(name, session)


def run_step(
    client: KvrecallClient,
    session: str,
    exchange: Exchange,
    call: str,
    pause: float,
    result_at: float,
) -> tuple[Turn, float]:
    """Call a tool, pause, send its result; that turn's answer and seconds to first token."""
    question, asking = exchange_messages(exchange, call)[:2]
    client.turn(session, [question, asking], generate=False)
    ends = time.perf_counter() + pause
    client.event(session, "tool_call.started", call)
    sleep_until(ends - pause * (1 - result_at))
    client.event(session, "tool_call.completed", call, result=exchange.tool_result or "")
    sleep_until(ends)
    started = time.perf_counter()
    # A single token: only the time to it counts, and both sessions continue with as many tokens.
    with client.stream(session, max_tokens=1) as stream:
        next(stream)
        seconds = time.perf_counter() - started
        return stream.read(), seconds


def sleep_until(moment: float) -> None:
    """Sleep until `time.perf_counter()` is `moment`; return at once if it has passed."""
    time.sleep(max(0.0, moment - time.perf_counter()))


def add_measurements(side: Side, turn: Turn, seconds: float) -> None:
    """Add the measurements of a step."""
    side.first_tokens.append(seconds)
    side.in_service.append(turn.seconds_to_first_token)
    side.repairs += turn.memory.repairs
    side.left_out += turn.memory.repair.skipped


def build_rows(sides: tuple[Side, Side], plan: Plan) -> list[Row]:
    """The result file's rows."""
    on, off = sides
    common = {"method": plan.method, "budget": plan.budget, "k": plan.repair_rows}
    pauses = {"pause_seconds": [plan.shortest, plan.longest], "result_at": plan.result_at}
    rows = in_time_rows(on, {**common, **pauses}, plan.seed)
    for metric, attribute in (
        ("time to first token", "first_tokens"),
        ("the service's share of it", "in_service"),
    ):
        values = {side.name: getattr(side, attribute) for side in sides}
        ratio = round(median(values[REPAIR]) / median(values[NO_REPAIR]), 4)
        rows.append(
            speed_row(
                REPAIR, metric, "seconds", values[REPAIR], ratio_to=NO_REPAIR, ratio=ratio, **common
            )
        )
        rows.append(speed_row(NO_REPAIR, metric, "seconds", values[NO_REPAIR], **common))
    pairs = [
        with_repair / without
        for with_repair, without in zip(on.first_tokens, off.first_tokens, strict=True)
    ]
    rows.append(
        speed_row(
            f"{REPAIR} over {NO_REPAIR}, paired", "time to first token", "ratio", pairs, **common
        )
    )
    for signal in list_signals(on):
        repairs = [repair for repair in on.repairs if repair.trigger == signal]
        for metric, unit, name in (
            ("repair", "seconds", "seconds"),
            ("share scanned", "share", "share_scanned"),
        ):
            rows.append(
                speed_row(
                    f"repair on {signal}",
                    metric,
                    unit,
                    [getattr(each, name) for each in repairs],
                    **common,
                )
            )
    return rows


def in_time_rows(side: Side, common: Mapping[str, Any], seed: int) -> list[Row]:
    """Share of repairs that ended inside their pause, over all that were due and by signal."""
    ended = {"all": [float(repair.in_pause) for repair in side.repairs] + [0.0] * side.left_out}
    for signal in list_signals(side):
        ended[signal] = [
            float(repair.in_pause) for repair in side.repairs if repair.trigger == signal
        ]
    estimates = {name: bootstrap(values, seed) for name, values in ended.items()}
    return [
        quality_row(f"repairs that ended in their pause: {name}", estimate, **common)
        for name, estimate in estimates.items()
        if estimate is not None
    ]


def list_signals(side: Side) -> Sequence[str]:
    """Signals that triggered repairs, in order of first occurrence."""
    return list(dict.fromkeys(repair.trigger for repair in side.repairs))


BENCHMARK = Benchmark(
    "pauses", "repairs in an agent's tool pauses, and the next turn", Plan, measure
)
