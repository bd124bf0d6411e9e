"""Bytes of the catalog for each session, turn and token.

`python -m benchmarks catalog` holds conversations in a service of this process, over a SQLite file and
over one Redis: a short turn of each session, several more, and a long one. What the catalog takes after
each is measured with the service stopped. Worker states are counted apart, the current one of each
session and those that are kept for forks: they follow from the model and the budget, as `kvrecall size`
computes them. The rest is divided between sessions, turns and tokens, whose bytes are constants there
(`kvrecall_server/app/start/catalog_size.py`). The result file goes to `benchmarks/results/`.
"""

import asyncio
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from pydantic import SecretStr

from benchmarks.benchmark import Benchmark, Measured
from benchmarks.options import option
from benchmarks.scale import backends
from benchmarks.scale.backends import Backend
from kvrecall.domain.messages import Message, Sampling
from kvrecall.domain.sessions.request import CreateSession
from kvrecall.domain.turn_request import TurnRequest
from kvrecall_server.app.catalog import open_catalog
from kvrecall_server.app.local.service import build_service
from kvrecall_server.app.settings import Settings
from kvrecall_server.reporting.results import Row, speed_row
from reference.conversation import generate
from services.catalog.base import Catalog
from services.catalog.serialization import pack
from workers.engine.settings import WorkerSettings

STORES: dict[str, Callable[[Path], AbstractContextManager[Backend]]] = {
    "sqlite": backends.sqlite,
    "redis": backends.one_redis,
}


@dataclass(frozen=True)
class Plan:
    """Sizes of a measurement."""

    stores: tuple[str, ...] = option(tuple(STORES), choices=tuple(STORES))
    sessions: int = 8
    turns: int = option(15, "short turns of each session after its first one")
    lines: int = option(3, "lines of the user in a short turn")
    long_lines: int = option(120, "lines of the user in the long turn")
    answer: int = option(16, "tokens of the longest answer")
    budget: int = 512
    model: str = "smollm2"
    seed: int = 7400


@dataclass(frozen=True)
class Held:
    """What a catalog has: bytes in all, those of current and of kept worker states, turns and tokens.

    `newest`: of the kept states, those of the last turns.
    """

    total: int
    states: int = 0
    kept: int = 0
    newest: int = 0
    turns: int = 0
    tokens: int = 0

    @property
    def rest(self) -> int:
        """Bytes beside the worker states."""
        return self.total - self.states - self.kept


@dataclass
class Talk:
    """Conversations over one catalog, in a service that is stopped between them."""

    settings: Settings
    plan: Plan
    backend: Backend
    sessions: list[str] = field(default_factory=list)
    said: int = 0

    async def go_on(self, turns: int, lines: int) -> Held:
        """Run turns of so many lines in every session; return what the catalog has then."""
        service = await build_service(self.settings)
        await service.start()
        while len(self.sessions) < self.plan.sessions:
            self.sessions.append((await service.create(CreateSession())).id)
        for _ in range(turns):
            message = Message("user", self._read(lines))
            request = TurnRequest((message,), sampling=Sampling(self.plan.answer))
            for session in self.sessions:
                async for _progress in service.turn(session, request):
                    pass
        await service.stop()
        return await self.look()

    async def look(self) -> Held:
        """Look into the catalog."""
        catalog = await open_catalog(self.settings)
        try:
            found = [await _look_at(catalog, session) for session in self.sessions]
        finally:
            await catalog.close()
        total = _count_bytes(self.settings.data, self.backend)
        return Held(total, *(sum(each) for each in zip(*found, strict=True)))

    def _read(self, lines: int) -> str:
        """Return the next lines that are said in all sessions."""
        self.said += 1
        talk = generate(self.plan.seed + self.said, 60 * lines, split="held_out")
        return " ".join(each.user for each in talk.exchanges[:lines])


async def _look_at(catalog: Catalog, session: str) -> tuple[int, int, int, int, int]:
    """Bytes of a session's state, of all kept ones and of the last; its turns and its tokens."""
    state = await catalog.sessions.get_worker_state(session)
    turns = await catalog.turns.get_after(session, 0, 1 << 20)
    found = [await catalog.turns.get_state(session, turn.number) for turn in turns]
    kept = [len(pack(each)) for each in found if each is not None]
    return len(state), sum(kept), kept[-1], len(turns), sum(len(turn.token_ids) for turn in turns)


def _count_bytes(data: Path, backend: Backend) -> int:
    """Bytes of the store: those of its Redis, or the pages that are used of its file."""
    if backend.url is not None:
        return backend.bytes_used()
    with closing(sqlite3.connect(f"file:{data / 'catalog.sqlite3'}?mode=ro", uri=True)) as file:
        size, pages, free = (
            file.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_size", "page_count", "freelist_count")
        )
    return int(size * (pages - free))


async def hold(backend: Backend, plan: Plan) -> list[Held]:
    """Hold the conversations; what the catalog has before them, and after each kind of turn."""
    url = None if backend.url is None else SecretStr(backend.url)
    worker = WorkerSettings(slots=4, max_budget=plan.budget)
    data = backend.folder / "data"
    settings = Settings(model=plan.model, data=data, catalog_url=url, worker=worker)
    talk = Talk(settings, plan, backend)
    return [
        await talk.look(),
        await talk.go_on(1, plan.lines),
        await talk.go_on(plan.turns, plan.lines),
        await talk.go_on(1, plan.long_lines),
    ]


def divide(empty: Held, first: Held, more: Held, long: Held) -> tuple[float, float, float]:
    """Divide the bytes beside the states: those of a session, of a turn and of a token.

    Each catalog holds what the one before has, and more.
    """
    steps = [(first, more), (more, long)]
    counts = [[after.turns - before.turns, after.tokens - before.tokens] for before, after in steps]
    added = [after.rest - before.rest for before, after in steps]
    turn, token = np.linalg.solve(np.array(counts, dtype=float), np.array(added, dtype=float))
    own = first.rest - empty.rest - first.turns * turn - first.tokens * token
    return own / first.turns, float(turn), float(token)


def build_rows(name: str, held: list[Held]) -> Iterator[Row]:
    """Rows of a store."""
    last = held[-1]
    common = {"turns": last.turns, "tokens": last.tokens}
    for what, value in zip(("session", "turn", "token"), divide(*held), strict=True):
        yield speed_row(name, f"of a {what}, without states", "bytes", [value], **common)
    state = last.states / held[1].turns
    ratio = {"ratio_to": "the current one", "ratio": round(last.newest / last.states, 4)}
    yield speed_row(name, "of a session's current state", "bytes", [state])
    yield speed_row(
        name, "of its newest kept state", "bytes", [last.newest / held[1].turns], **ratio
    )


def measure(plan: Plan) -> Measured:
    """Measure the catalogs of the plan."""
    return Measured("catalog.json", plan.model, _measure_stores(plan), plan.seed)


def _measure_stores(plan: Plan) -> Iterator[Row]:
    with tempfile.TemporaryDirectory(prefix="kvrecall-catalog-") as folder:
        for name in plan.stores:
            with STORES[name](Path(folder) / name) as backend:
                yield from build_rows(backend.name, asyncio.run(hold(backend, plan)))


BENCHMARK = Benchmark(
    "catalog", "bytes of the catalog by sessions, turns and tokens", Plan, measure
)
