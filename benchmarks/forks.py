"""Forks of a long session: seconds of a fork, bytes that it adds, and equality of the answers.

`python -m benchmarks forks` builds a session of 20,000 tokens in a service of this process (over
files, as in `kvrecall serve`) and forks it 100 times: seconds of each fork, and bytes added to
catalog and tiers, as shares of the session's own. Then `kvrecall serve` starts over the same files:
the session is forked 100 times over HTTP, and 100 times at one of the 15 turns before its last one;
parent and forks are asked the same questions in
turn. On a shorter session 100 forks are each asked a question of their own, and 100 sessions that
were built separately (each in a tenant of its own, so that no pages are shared) are asked the same.
Answers are greedy. The result file goes to `benchmarks/results/`.
"""

import asyncio
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.benchmark import Benchmark, Measured
from benchmarks.options import option
from kvrecall.client import KvrecallClient
from kvrecall.domain.messages import Message, ToolCall
from kvrecall.domain.sessions.request import CreateSession
from kvrecall.domain.turn_request import TurnRequest
from kvrecall_server.app.local.server import ServerNeeds, server_at
from kvrecall_server.app.local.service import build_service
from kvrecall_server.app.models import REFERENCE_NAME
from kvrecall_server.app.settings import Settings
from kvrecall_server.reporting.results import Row, bootstrap, quality_row, speed_row
from reference import MODEL_PATH
from reference.conversation import Conversation, exchange_messages, generate
from services.lifecycle.forks import ForkRequest
from services.service import SessionService
from workers.engine.settings import WorkerSettings

MESSAGES_PER_TURN = 64
# A longer conversation is generated than is appended: exchanges with tool calls are left out.
SPARE = 1.5
WARM_FORKS = 3
SLOTS = 4
# Positions of the served model: twice those in the reference model's configuration.
POSITIONS = 32_768

Json = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """Sizes of a measurement.

    `tokens` and `short_tokens` are those of the long and the short session, `output_tokens` those
    of an answer; `budget` and `repair_rows` are rows.
    """

    seed: int = 7200
    tokens: int = option(20_000, "tokens of the session that is forked")
    short_tokens: int = option(1_500, "tokens of the session whose answers are compared")
    forks: int = 100
    questions: int = option(10, "questions to parent and fork at the full length")
    budget: int = 256
    repair_rows: int = 64
    method: str = "snapkv"
    output_tokens: int = 16

    @property
    def settings(self) -> Json:
        """Settings of a new session."""
        return {
            "budget": self.budget,
            "research": {"repair_rows": self.repair_rows, "method": self.method},
            "seed": self.seed,
        }

    @property
    def common(self) -> Json:
        """Columns of every row."""
        return {"method": self.method, "budget": self.budget, "k": self.repair_rows}


@dataclass(frozen=True)
class StoredBytes:
    """Bytes of the catalog's files, and of rows by tier."""

    catalog: int
    tiers: dict[str, int]

    @property
    def disk(self) -> int:
        """Bytes on the disk."""
        return self.catalog + self.tiers.get("nvme", 0)


def measure(plan: Plan) -> Measured:
    """Measure forks; the answers of parents and forks are compared."""
    model = f"{REFERENCE_NAME}, {POSITIONS} positions"
    return Measured("forks.json", model, build_rows(plan), plan.seed)


def build_rows(plan: Plan) -> Iterator[Row]:
    """The result file's rows."""
    with long_model() as model, tempfile.TemporaryDirectory(prefix="kvrecall-") as folder:
        data = Path(folder) / "data"
        settings = Settings(
            model=str(model), data=data, worker=WorkerSettings(slots=SLOTS, max_budget=plan.budget)
        )
        session, alone = asyncio.run(build(settings, plan))
        in_service, more = asyncio.run(fork_in_service(settings, session, plan))
        added = StoredBytes(catalog_bytes(data) - alone.catalog, more)
        needs = ServerNeeds(model=str(model), slots=SLOTS, max_budget=plan.budget, data=data)
        with server_at(None, needs) as url, KvrecallClient(url) as client:
            turns = client.get_session(session).turns
            over_http = fork_over_http(client, session, plan, [turns])
            earlier = fork_over_http(client, session, plan, range(max(1, turns - 15), turns))
            same_long = ask_in_turn(client, session, plan)
            same_short = compare_with_separate(client, url, plan)
    yield from [
        speed_row("over HTTP", "fork", "seconds", over_http, tokens=plan.tokens, **plan.common),
        speed_row(
            "over HTTP, at an earlier turn",
            "fork",
            "seconds",
            earlier,
            tokens=plan.tokens,
            **plan.common,
        ),
        speed_row(
            "inside the service", "fork", "seconds", in_service, tokens=plan.tokens, **plan.common
        ),
        *byte_rows(alone, added, plan),
        *answer_rows(same_long, same_short, plan),
    ]


@contextmanager
def long_model() -> Iterator[Path]:
    """Folder of the reference model with more positions in its configuration, the same weights."""
    with tempfile.TemporaryDirectory(prefix="kvrecall-model-") as folder:
        path = Path(folder) / "reference"
        shutil.copytree(MODEL_PATH, path)
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        text = json.dumps(config | {"max_position_embeddings": POSITIONS})
        (path / "config.json").write_text(text, encoding="utf-8")
        yield path


async def build(settings: Settings, plan: Plan) -> tuple[str, StoredBytes]:
    """A long session, and the bytes that it takes when the service has stopped."""
    conversation = build_conversation(plan.seed, plan.tokens)
    service = await build_service(settings)
    await service.start()
    session = await service.create(
        CreateSession(**plan.settings, tools=tuple(json.dumps(tool) for tool in conversation.tools))
    )
    for messages in split_turns(conversation):
        if (await service.memory(session.id)).length < plan.tokens:
            await append(service, session.id, messages)
    tiers = await tier_bytes(service)
    await service.stop()
    return session.id, StoredBytes(catalog_bytes(settings.data), tiers)


def build_conversation(seed: int, tokens: int) -> Conversation:
    """A conversation that is long enough for a session of `tokens` tokens."""
    return generate(seed, int(SPARE * tokens), split="held_out")


async def append(service: SessionService, session: str, messages: Sequence[Json]) -> None:
    """Append messages as a turn without generating."""
    request = TurnRequest(tuple(to_message(each) for each in messages), generate=False)
    async for _ in service.turn(session, request):
        pass


def to_message(message: Json) -> Message:
    """Domain value of an OpenAI-style message."""
    calls = tuple(
        ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls") or ()
    )
    return Message(
        message["role"], message.get("content") or "", calls, message.get("tool_call_id", "")
    )


def split_turns(conversation: Conversation) -> list[list[Json]]:
    """The conversation in few turns, without tool calls: they would pause the session."""
    messages: list[Json] = [{"role": "system", "content": conversation.system}]
    for number, exchange in enumerate(conversation.exchanges):
        if exchange.tool_call is None:
            messages += exchange_messages(exchange, f"call {number}")
    return [
        messages[start : start + MESSAGES_PER_TURN]
        for start in range(0, len(messages), MESSAGES_PER_TURN)
    ]


async def fork_in_service(
    settings: Settings, session: str, plan: Plan
) -> tuple[list[float], dict[str, int]]:
    """Seconds of each fork, without HTTP, and bytes that all of them add to each tier."""
    service = await build_service(settings)
    await service.start()
    for _ in range(WARM_FORKS):
        await service.delete((await service.fork(session, ForkRequest())).id)
    before = await tier_bytes(service)
    seconds = []
    for _ in range(plan.forks):
        started = time.perf_counter()
        await service.fork(session, ForkRequest())
        seconds.append(time.perf_counter() - started)
    after = await tier_bytes(service)
    await service.stop()
    return seconds, {name: after[name] - before[name] for name in after}


async def tier_bytes(service: SessionService) -> dict[str, int]:
    """Bytes of rows in each tier."""
    (stats,) = (await service.describe_workers())[1].values()
    return {name: tier.bytes for name, tier in stats.tiers.items()}


def catalog_bytes(data: Path) -> int:
    """Bytes of the catalog's files, after the service has closed them."""
    return sum(os.path.getsize(path) for path in data.glob("catalog.sqlite3*"))


def fork_over_http(
    client: KvrecallClient, session: str, plan: Plan, turns: Sequence[int]
) -> list[float]:
    """Seconds of each fork at one of these turns after the other, measured by a client."""
    for _ in range(WARM_FORKS):
        client.delete_session(client.fork(session).id)
    seconds = []
    made = []
    for number in range(plan.forks):
        started = time.perf_counter()
        made.append(client.fork(session, turns[number % len(turns)]).id)
        seconds.append(time.perf_counter() - started)
    for child in made:
        client.delete_session(child)
    return seconds


def ask_in_turn(client: KvrecallClient, session: str, plan: Plan) -> list[bool]:
    """For each question, true if a new fork and its parent give the same answer."""
    same = []
    for question in list_questions(build_conversation(plan.seed, plan.tokens), plan.questions):
        child = client.fork(session).id
        same.append(
            answer(client, child, question, plan) == answer(client, session, question, plan)
        )
    return same


def compare_with_separate(client: KvrecallClient, url: str, plan: Plan) -> list[bool]:
    """For each fork of a short session, true if it answers as a separately built session."""
    conversation = build_conversation(plan.seed + 1, plan.short_tokens)
    parent = build_session(client, conversation, plan)
    same = []
    for number, question in enumerate(list_questions(conversation, plan.forks)):
        child = client.fork(parent).id
        with KvrecallClient(url, tenant=f"alone-{number}") as alone:
            session = build_session(alone, conversation, plan)
            same.append(
                answer(client, child, question, plan) == answer(alone, session, question, plan)
            )
            alone.delete_session(session)
    return same


def build_session(client: KvrecallClient, conversation: Conversation, plan: Plan) -> str:
    """Id of a new session with the conversation appended."""
    session = client.create_session(**plan.settings, tools=conversation.tools).id
    for messages in split_turns(conversation):
        client.turn(session, messages, generate=False)
    return session


def list_questions(conversation: Conversation, number: int) -> list[str]:
    """User messages of the conversation, repeated with a number until there are `number`."""
    asked = [
        exchange_messages(exchange, "asked")[0]["content"] for exchange in conversation.exchanges
    ]
    return [
        f"{asked[i % len(asked)]}{' ' + str(i // len(asked)) if i >= len(asked) else ''}"
        for i in range(number)
    ]


def answer(client: KvrecallClient, session: str, question: str, plan: Plan) -> tuple[str, Any]:
    """Greedy answer of a session: text and tool calls."""
    turn = client.turn(session, question, max_tokens=plan.output_tokens)
    calls = [(call.name, call.function.arguments) for call in turn.tool_calls]
    return turn.text, calls


def byte_rows(alone: StoredBytes, more: StoredBytes, plan: Plan) -> list[Row]:
    """Bytes that a fork adds, as a share of the session's own on the disk.

    `alone` are the session's bytes, `more` those that all forks have added.
    """
    pairs = [
        ("rows and catalog on disk", alone.disk, more.disk),
        ("catalog", alone.catalog, more.catalog),
        *((f"tier {name}", size, more.tiers[name]) for name, size in alone.tiers.items()),
    ]
    rows: list[Row] = []
    for name, before, all_added in pairs:
        added = all_added / plan.forks
        row = speed_row(
            name,
            "added by a fork",
            "bytes",
            [added],
            ratio_to="the session alone",
            ratio=round(added / alone.disk, 6),
        )
        rows.append(
            {
                **row,
                "session_bytes": before,
                "forks": plan.forks,
                "tokens": plan.tokens,
                **plan.common,
            }
        )
    return rows


def answer_rows(same_long: Sequence[bool], same_short: Sequence[bool], plan: Plan) -> list[Row]:
    """Rows with the shares of equal answers."""
    pairs = [
        ("a fork answers as its parent", same_long, plan.tokens),
        ("a fork answers as a session built by itself", same_short, plan.short_tokens),
    ]
    found = [
        (name, bootstrap([float(each) for each in same], plan.seed), tokens)
        for name, same, tokens in pairs
    ]
    return [
        quality_row(name, each, tokens=tokens, **plan.common)
        for name, each, tokens in found
        if each is not None
    ]


BENCHMARK = Benchmark("forks", "seconds and bytes of forks, and equality of answers", Plan, measure)
