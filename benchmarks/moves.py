"""Moves of a session to another worker: seconds to the first token, against a new prefill.

`python -m benchmarks moves` starts a Redis, two workers and a gateway, appends a conversation of
4,000 tokens to sessions, and then, in turn: moves a session and asks it; asks a session that was
not moved; and appends the whole log to a new session, with the same question at its end. Seconds
are those from the question's request to its first streamed token, with those of the move where it
counts. Each session is in a tenant of its own, so that no prefill is saved by shared pages. The
result file goes to `benchmarks/results/`.
"""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.benchmark import Benchmark, Measured
from benchmarks.forks import split_turns
from benchmarks.options import option
from faults.rig.ports import free_port
from faults.rig.processes import ServerProcess
from faults.rig.redis_process import RedisProcess, running
from kvrecall.client import KvrecallClient, TextDelta, ToolCallEvent
from kvrecall.domain.settings.session import PAUSE_TRIGGERS
from kvrecall_server.app.models import REFERENCE, REFERENCE_NAME
from kvrecall_server.reporting.results import Row, speed_row
from reference.conversation import Conversation, generate

QUESTION = "What did I tell you first?"
Json = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """Sizes of a measurement."""

    seed: int = 7300
    tokens: int = option(4_000, "tokens of a session")
    sessions: int = option(12, "sessions that are moved, and as many that are not")
    budget: int = 256
    repair_rows: int = 64
    method: str = "snapkv"

    @property
    def settings(self) -> Json:
        """Settings of a new session."""
        return {
            "budget": self.budget,
            "research": {
                "repair_rows": self.repair_rows,
                "repair_on": sorted(PAUSE_TRIGGERS),
                "method": self.method,
            },
            "seed": self.seed,
        }


def measure(plan: Plan) -> Measured:
    """Measure moves in a cluster of this machine."""

    def rows() -> Iterator[Row]:
        with (
            tempfile.TemporaryDirectory(prefix="kvrecall-") as folder,
            cluster(Path(folder)) as url,
        ):
            yield from compare(url, plan.seed, plan.tokens, plan.sessions, plan.settings)

    return Measured("moves.json", REFERENCE_NAME, rows(), plan.seed)


@contextmanager
def cluster(folder: Path) -> Iterator[str]:
    """Address of a gateway with two workers, catalog and rows in a Redis that syncs every write."""
    with running(RedisProcess(folder / "redis")) as redis:
        named = {
            "KVRECALL_MODEL": REFERENCE,
            "KVRECALL_STORE__REDIS_URL": redis.url,
            "KVRECALL_CATALOG_URL": redis.url,
        }
        servers = []
        for number in (1, 2):
            arguments = ["--listen", "127.0.0.1:0", "--data", str(folder / f"worker-{number}")]
            servers.append(ServerProcess(f"worker-{number}", "worker", arguments, named, folder))
        port = free_port()
        arguments = ["--host", "127.0.0.1", "--port", str(port), "--data", str(folder / "gateway")]
        servers.append(ServerProcess("gateway", "gateway", arguments, named, folder))
        try:
            for server in servers:
                server.start()
            yield f"http://127.0.0.1:{port}"
        finally:
            for server in reversed(servers):
                server.stop()


def compare(url: str, seed: int, tokens: int, sessions: int, settings: Json) -> list[Row]:
    """The result file's rows."""
    moves = []
    moved = []
    together = []
    stayed = []
    prefilled = []
    for number in range(sessions):
        conversation = generate(seed + number, tokens, split="held_out")
        moving, staying = (
            build_session(url, f"{name}-{number}", conversation, settings)
            for name in ("goes", "stays")
        )
        with KvrecallClient(url, tenant=f"goes-{number}") as client:
            started = time.perf_counter()
            client.move(moving)
            moves.append(time.perf_counter() - started)
            moved.append(first_token(client, moving, question()))
            together.append(moves[-1] + moved[-1])
        with KvrecallClient(url, tenant=f"stays-{number}") as client:
            stayed.append(first_token(client, staying, question()))
        with KvrecallClient(url, tenant=f"anew-{number}") as client:
            session = client.create_session(**settings, tools=conversation.tools).id
            log = [message for messages in split_turns(conversation) for message in messages]
            prefilled.append(first_token(client, session, [*log, *question()]))
    common = {"tokens": tokens, **settings}
    conditions = {
        "asked after a move": moved,
        "move and question together": together,
        "asked where it stayed": stayed,
    }
    rows = [speed_row("the log prefilled again", "first token", "seconds", prefilled, **common)]
    rows += [speed_row("the move", "request", "seconds", moves, **common)]
    for name, seconds in conditions.items():
        ratio = median(again / own for again, own in zip(prefilled, seconds, strict=True))
        against = {"ratio_to": "sooner than the log prefilled again", "ratio": round(ratio, 2)}
        rows.append(speed_row(name, "first token", "seconds", seconds, **against, **common))
    return rows


def build_session(url: str, tenant: str, conversation: Conversation, settings: Json) -> str:
    """Id of a new session with the conversation appended."""
    with KvrecallClient(url, tenant=tenant) as client:
        session = client.create_session(**settings, tools=conversation.tools).id
        for messages in split_turns(conversation):
            client.turn(session, messages, generate=False)
    return session


def question() -> list[Json]:
    """The question at the end, as messages."""
    return [{"role": "user", "content": QUESTION}]


def first_token(client: KvrecallClient, session: str, messages: list[Json]) -> float:
    """Seconds from the request of a turn to the first streamed token of its answer."""
    started = time.perf_counter()
    seconds = 0.0
    for event in client.stream(session, messages, max_tokens=4):
        if not seconds and isinstance(event, TextDelta | ToolCallEvent):
            seconds = time.perf_counter() - started
    return seconds


BENCHMARK = Benchmark("moves", "the first token after a move, beside a new prefill", Plan, measure)
