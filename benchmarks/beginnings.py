"""First tokens of requests that begin as others did: a clock, a tool more, an edit, a dropped beginning.

`python -m benchmarks beginnings --model smollm2` starts `kvrecall serve` and sends an agent's conversations
over chat completions, whole with each request. Each is sent once, and then again with a change: another
conversation of the same system prompt, another last line of the system prompt, a tool more, an edited early
message, a beginning that is left out. The same changed request is sent under a `cache_salt` of its own as
well, which shares nothing: that is what it would cost without sharing. The two take turns in going first.
Rows have the seconds to the first token and the share of the prompt that was cached. The result file goes
to `benchmarks/results/`.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import httpx

from benchmarks.benchmark import Benchmark, Measured
from benchmarks.options import option
from kvrecall_server.app.local.server import ServerNeeds, server_at
from kvrecall_server.reporting.results import Row, speed_row
from reference.conversation import generate

Json = dict[str, Any]
ALONE, SHARED = "alone", "shared"
CLOCK = "The time is {}."
# A generated word has more than one token.
_WORDS_PER_TOKEN = 0.75
_TIMEOUT_SECONDS = 1800.0


@dataclass(frozen=True)
class Plan:
    """Sizes of a measurement: tokens of the system prompt and of the messages behind it."""

    seed: int = 7400
    system: int = option(2000, "tokens of the system prompt")
    messages: int = option(1500, "tokens of the messages behind it")
    repeats: int = option(5, "conversations for each change")
    model: str = "reference"


@dataclass(frozen=True)
class Request:
    """A whole conversation and its tools."""

    messages: tuple[Json, ...]
    tools: tuple[Json, ...]

    @property
    def system(self) -> str:
        """The text of the system prompt."""
        text: str = self.messages[0]["content"]
        return text


@dataclass(frozen=True)
class Answered:
    """What an answer cost: seconds to its first token, tokens of the prompt, and cached ones."""

    seconds: float
    prompt: int
    cached: int


def measure(plan: Plan) -> Measured:
    """Measure first tokens of changed requests, shared and alone."""
    return Measured(f"beginnings-{plan.model}.json", plan.model, compare(plan), plan.seed)


def compare(plan: Plan) -> Iterator[Row]:
    """Rows of each change."""
    with (
        server_at(None, ServerNeeds(model=plan.model)) as url,
        httpx.Client(base_url=url, timeout=_TIMEOUT_SECONDS) as client,
    ):
        model = client.get("/v1/models").json()["data"][0]["id"]
        send(client, model, build_request(plan, plan.seed), "warm")
        for number, change in enumerate(CHANGES):
            found: dict[str, list[Answered]] = {SHARED: [], ALONE: []}
            for repeat in range(plan.repeats):
                seed = plan.seed + 100 * (number + 1) + repeat
                before = build_request(plan, seed)
                send(client, model, before, "")
                after = CHANGES[change](before, plan, seed)
                salts = {SHARED: "", ALONE: f"{change} {repeat}"}
                for name in list(salts)[:: 1 if repeat % 2 else -1]:
                    found[name].append(send(client, model, after, salts[name]))
            yield from build_rows(change, found)


def build_request(plan: Plan, seed: int) -> Request:
    """An agent's conversation: a system prompt with a clock in its last line, exchanges, tools."""
    conversation = generate(seed, 8 * (plan.system + plan.messages), split="held_out")
    lines = iter([each.user for each in conversation.exchanges if each.tool_call is None])
    system = f"{_take(lines, plan.system)} {CLOCK.format('12:00')}"
    messages: list[Json] = [{"role": "system", "content": system}]
    while sum(len(each["content"].split()) for each in messages[1:]) < (
        plan.messages * _WORDS_PER_TOKEN
    ):
        messages.append({"role": "user", "content": _take(lines, 60)})
        messages.append({"role": "assistant", "content": _take(lines, 60)})
    messages.append({"role": "user", "content": _take(lines, 30)})
    return Request(tuple(messages), tuple(conversation.tools))


def _take(lines: Iterator[str], tokens: int) -> str:
    text = next(lines)
    while len(text.split()) < tokens * _WORDS_PER_TOKEN:
        text = f"{text} {next(lines)}"
    return text


def begin_another(before: Request, plan: Plan, seed: int) -> Request:
    """Another conversation of the same agent."""
    other = build_request(plan, seed + 50)
    return Request((before.messages[0], other.messages[-1]), before.tools)


def change_clock(before: Request, plan: Plan, seed: int) -> Request:
    """The same conversation, with another time in the last line of the system prompt."""
    system = before.system.replace(CLOCK.format("12:00"), CLOCK.format("17:45"))
    return Request(({"role": "system", "content": system}, *before.messages[1:]), before.tools)


def add_tool(before: Request, plan: Plan, seed: int) -> Request:
    """The same conversation with a tool more."""
    function = {"name": "write_letter", "description": "Write a letter.", "parameters": {}}
    tool = {"type": "function", "function": function}
    return Request(before.messages, (*before.tools, tool))


def edit_message(before: Request, plan: Plan, seed: int) -> Request:
    """The same conversation, whose first message is another."""
    system, first, *others = before.messages
    edited = {**first, "content": f"{first['content']} Please be brief."}
    return Request((system, edited, *others), before.tools)


def drop_beginning(before: Request, plan: Plan, seed: int) -> Request:
    """The same conversation without its first two exchanges."""
    return Request((before.messages[0], *before.messages[5:]), before.tools)


CHANGES = {
    "another conversation": begin_another,
    "another clock": change_clock,
    "a tool more": add_tool,
    "an edited message": edit_message,
    "a dropped beginning": drop_beginning,
}


def send(client: httpx.Client, model: str, request: Request, salt: str) -> Answered:
    """Send a request; return what its answer cost."""
    body: Json = {
        "model": model,
        "messages": request.messages,
        "tools": request.tools,
        "max_tokens": 4,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if salt:
        body["cache_salt"] = salt
    began = time.perf_counter()
    first = 0.0
    usage: Json = {}
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            usage = chunk.get("usage") or usage
            said = [text for each in chunk["choices"] for text in _get_said(each["delta"])]
            if not first and any(said):
                first = time.perf_counter() - began
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Answered(first, usage["prompt_tokens"], cached)


def _get_said(delta: Json) -> list[Any]:
    """What a piece of an answer says: text, reasoning, calls."""
    return [delta.get(name) for name in ("content", "reasoning_content", "tool_calls")]


def build_rows(change: str, found: Mapping[str, Sequence[Answered]]) -> list[Row]:
    """The rows of one change; ratios are medians over pairs of the same request."""
    rows: list[Row] = []
    for name, answers in found.items():
        pairs = zip(answers, found[ALONE], strict=True)
        ratio = round(median(one.seconds / other.seconds for one, other in pairs), 4)
        times = [each.seconds for each in answers]
        condition = f"{change}, {name}"
        row = speed_row(condition, "first token", "seconds", times, ratio_to=ALONE, ratio=ratio)
        shares = [each.cached / each.prompt for each in answers]
        prompt = median(each.prompt for each in answers)
        rows.append({**row, "prompt_tokens": prompt, "cached_share": round(median(shares), 4)})
    return rows


def describe(row: Row) -> str:
    """A row as a line of text."""
    return (
        f"{row['condition']:<36} {row['median']:8.3f} s (p95 {row['p95']:.3f}, n = {row['n']})"
        f"  {row['ratio']:.3f} x {row['ratio_to']}"
        f"  {row['cached_share']:.1%} of {row['prompt_tokens']:,.0f} tokens cached"
    )


BENCHMARK = Benchmark(
    "beginnings",
    "first tokens of requests that begin as others did, shared and alone",
    Plan,
    measure,
    describe=describe,
)
