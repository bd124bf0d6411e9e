"""First tokens after a tool's output that was reported while it came, and that was not.

`python -m benchmarks ahead --model smollm2` starts `kvrecall serve` and pauses two sessions of the same
conversation, one after the other, on a tool call. The tool's output comes in pieces over the pause. One
session is told of each piece, the other of the result alone when it is complete, as a client that reports
nothing. The turn follows at once, and its first token is timed. Rows have these seconds and the ratio of the
two, paired; the answers are equal, or the run fails. The result file goes to `benchmarks/results/`.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from statistics import median
from typing import Any

from benchmarks.benchmark import Benchmark, Measured
from benchmarks.options import option
from kvrecall.client import KvrecallClient
from kvrecall_server.app.local.server import ServerNeeds, server_at
from kvrecall_server.reporting.results import Row, speed_row
from reference.conversation import generate

REPORTED, AT_ONCE = "output reported as it comes", "result alone"
# A generated word has more than one token.
_WORDS_PER_TOKEN = 0.75
_ANSWER_TOKENS = 8


@dataclass(frozen=True)
class Plan:
    """Sizes of a measurement: tokens, and the seconds over which an output comes."""

    seed: int = 7500
    context: int = option(2000, "tokens before the tool call")
    outputs: tuple[int, ...] = option((500, 1500, 4000), "tokens of the tool's output")
    pause: float = option(10.0, "seconds over which it comes")
    pieces: int = option(20, "pieces in which it comes")
    repeats: int = option(5, "pairs of pauses of each size")
    model: str = "reference"


@dataclass(frozen=True)
class Answered:
    """An answer's text, and the seconds to its first token."""

    text: str
    seconds: float


def measure(plan: Plan) -> Measured:
    """Measure first tokens after outputs of each size."""
    return Measured(f"ahead-{plan.model}.json", plan.model, compare(plan), plan.seed)


def compare(plan: Plan) -> Iterator[Row]:
    """Rows of each size. Raises ValueError where the two sessions answer differently."""
    needs = ServerNeeds(model=plan.model)
    with server_at(None, needs) as url, KvrecallClient(url, timeout_seconds=1800.0) as client:
        for number, tokens in enumerate(plan.outputs):
            found: dict[str, list[Answered]] = {REPORTED: [], AT_ONCE: []}
            for repeat in range(-1, plan.repeats):  # the first pair warms up
                seed = plan.seed + 100 * number + repeat
                pair = {
                    name: answer(client, plan, seed, tokens, reports=name == REPORTED)
                    for name in list(found)[:: 1 if repeat % 2 else -1]
                }
                if pair[REPORTED].text != pair[AT_ONCE].text:
                    raise ValueError(f"the sessions of seed {seed} answer differently: {pair}")
                if repeat >= 0:
                    for name, answered in pair.items():
                        found[name].append(answered)
            yield from build_rows(found, plan, tokens)


def answer(
    client: KvrecallClient, plan: Plan, seed: int, tokens: int, *, reports: bool
) -> Answered:
    """Pause a new session on a tool call, wait for the output, and take the turn that follows."""
    lines = _say(seed, plan.context + tokens)
    # Sessions share nothing: what one has computed, the other would find.
    session = client.create_session(seed=seed, cache_salt=f"{seed} {reports}").id
    arguments = '{"command": "make test"}'
    call = {"id": "c1", "type": "function", "function": {"name": "run", "arguments": arguments}}
    asked: list[dict[str, Any]] = [
        {"role": "user", "content": _take(lines, plan.context)},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    client.turn(session, asked, generate=False)
    output = _take(lines, tokens)
    size = -(-len(output) // plan.pieces)
    ends = time.perf_counter() + plan.pause
    for number in range(plan.pieces):
        time.sleep(
            max(0.0, ends - plan.pause * (1 - (number + 1) / plan.pieces) - time.perf_counter())
        )
        if reports:
            piece = output[number * size : (number + 1) * size]
            client.event(session, "tool_call.delta", "c1", delta=piece, index=number)
    began = time.perf_counter()
    result = [{"role": "tool", "content": output, "tool_call_id": "c1"}]
    with client.stream(session, result, max_tokens=_ANSWER_TOKENS, temperature=0) as stream:
        next(stream)
        seconds = time.perf_counter() - began
        text = stream.read().text
    client.delete_session(session)
    return Answered(text, seconds)


def _say(seed: int, tokens: int) -> Iterator[str]:
    conversation = generate(seed, 8 * tokens, split="held_out")
    return iter([each.user for each in conversation.exchanges if each.tool_call is None])


def _take(lines: Iterator[str], tokens: int) -> str:
    words: list[str] = []
    while len(words) < tokens * _WORDS_PER_TOKEN:
        words += next(lines).split()
    return " ".join(islice(words, int(tokens * _WORDS_PER_TOKEN)))


def build_rows(found: dict[str, list[Answered]], plan: Plan, tokens: int) -> list[Row]:
    """The rows of one size; the ratio is the median over pairs."""
    seconds = {name: [each.seconds for each in answers] for name, answers in found.items()}
    pairs = zip(seconds[REPORTED], seconds[AT_ONCE], strict=True)
    ratio = round(median(one / other for one, other in pairs), 4)
    common: dict[str, Any] = {"output_tokens": tokens, "pause_seconds": plan.pause}
    return [
        speed_row(
            REPORTED,
            "first token",
            "seconds",
            seconds[REPORTED],
            ratio_to=AT_ONCE,
            ratio=ratio,
            **common,
        ),
        speed_row(AT_ONCE, "first token", "seconds", seconds[AT_ONCE], **common),
    ]


BENCHMARK = Benchmark(
    "ahead", "first tokens after tools' outputs that were reported as they came", Plan, measure
)
