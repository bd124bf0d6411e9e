"""Gateways over one catalog and simulated workers: filled with sessions, then measured."""

import asyncio
import gc
import random
import time
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from benchmarks.scale.backends import Backend
from kvrecall.app.redis import redis_client
from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.messages import Message, Sampling
from kvrecall.domain.reports import MemoryReport, TurnOutcome
from kvrecall.domain.session import Session, Turn
from kvrecall.domain.session_request import CreateSession, resolve_settings
from kvrecall.domain.turn_request import TurnRequest
from kvrecall.protocol.v1 import worker_pb2 as pb
from kvrecall.reporting.results import Row, speed_row
from services.catalog.base import Catalog
from services.catalog.records import TurnCommit
from services.cluster.pool import WorkerPool
from services.cluster.registry import RedisRegistry, StaticRegistry
from services.cluster.settings import WireSettings
from services.forks import ForkRequest
from services.service import SessionService

TEXT = Message("user", " ".join(f"word{number}" for number in range(32)))
ANSWER = Message("assistant", "ok")
# Catalog writes under way at once while sessions are filled in.
_WRITERS = 64
_PAGE = 200
_QUIET_SECONDS = 3.0
# Sessions before and after which a gateway's memory is compared.
_SERVED = 400


@dataclass(frozen=True)
class Plan:
    """Sizes of a measurement: `repetitions` of each operation, `state_bytes` of a session's state."""

    seed: int
    gateways: int
    workers: int
    repetitions: int
    state_bytes: int
    namespace: str = "kvrecall"


@dataclass
class Fleet:
    """Gateways in this process, and the ids of the sessions that were filled in."""

    backend: Backend
    plan: Plan
    gateways: list[SessionService]
    catalog: Catalog
    addresses: Sequence[str]
    sessions: list[str]
    rng: random.Random

    async def fill(self, count: int) -> None:
        """Add sessions with one turn each to the catalog until there are `count`."""
        settings = resolve_settings(CreateSession(), self.gateways[0].info, ServiceLimits())
        state = pb.SessionState(length=34, selection=bytes(self.plan.state_bytes))
        permits = asyncio.Semaphore(_WRITERS)

        async def add(number: int) -> str:
            async with permits:
                name, now = f"s_{number:024x}", time.time()
                memory = MemoryReport(budget=settings.budget, length=34)
                session = Session(name, 1, settings, now, now, 0, memory, worker="gone")
                await self.catalog.sessions.create(session, b"", None)
                outcome = TurnOutcome(name, 1, ANSWER, "stop", 33, 1, memory, (), {})
                turn = Turn(name, 1, (TEXT,), tuple(range(34)), outcome, (33, 1))
                commit = TurnCommit(turn, state.SerializeToString())
                await self.catalog.turns.commit(commit, 1, None)
                return name

        added = (add(number) for number in range(len(self.sessions), count))
        self.sessions += await asyncio.gather(*added)

    async def measure(self) -> list[Row]:
        """Measure every operation with the sessions that there are now."""
        rows = list[Row]()
        for operation, run in self._operations().items():
            rows.append(self._row(operation, "duration", "seconds", await run()))
        rows.append(self._row("turn", "Redis commands", "count", [await self._count_commands()]))
        rows.append(self._row("catalog", "size per session", "bytes", [self._size_per_session()]))
        touched = await self._measure_memory()
        rows.append(self._row("gateway", "memory per session it has served", "bytes", [touched]))
        return rows

    def _operations(self) -> dict[str, Callable[[], Awaitable[list[float]]]]:
        return {
            "create": lambda: self._repeat(self._create),
            "turn, session open": self._time_warm_turns,
            "turn, session of another gateway": lambda: self._repeat(self._cold_turn),
            "fork": lambda: self._repeat(self._fork),
            "delete": self._time_deletions,
            "list, first page": lambda: self._repeat(self._list_page),
            "list, page in the middle": self._time_middle_pages,
            "tokens of a tenant": lambda: self._repeat(self._sum_tokens),
            "sweep, nothing orphaned": lambda: self._repeat(self._find_orphans),
            "start of a gateway": self._time_starts,
        }

    def _row(self, operation: str, metric: str, unit: str, values: Sequence[float]) -> Row:
        return speed_row(
            f"{self.backend.name}: {operation}",
            metric,
            unit,
            values,
            sessions=len(self.sessions),
            gateways=self.plan.gateways,
            workers=self.plan.workers,
        )

    async def _repeat(self, operation: Callable[[], Awaitable[object]]) -> list[float]:
        return [await _time(operation()) for _ in range(self.plan.repetitions)]

    def _choose(self) -> tuple[SessionService, str]:
        return self.rng.choice(self.gateways), self.rng.choice(self.sessions)

    async def _create(self) -> str:
        return (await self.rng.choice(self.gateways).create(CreateSession())).id

    async def _cold_turn(self) -> None:
        gateway, session = self._choose()
        await run_turn(gateway, session)

    async def _time_warm_turns(self) -> list[float]:
        durations = []
        for _ in range(self.plan.repetitions):
            gateway, session = self._choose()
            await run_turn(gateway, session)
            durations.append(await _time(run_turn(gateway, session)))
        return durations

    async def _fork(self) -> None:
        gateway, session = self._choose()
        await gateway.fork(session, ForkRequest())

    async def _time_deletions(self) -> list[float]:
        durations = []
        for _ in range(self.plan.repetitions):
            gateway = self.rng.choice(self.gateways)
            session = (await gateway.create(CreateSession())).id
            await run_turn(gateway, session)
            durations.append(await _time(gateway.delete(session)))
        return durations

    async def _list_page(self) -> None:
        await self.gateways[0].page(_PAGE, None)

    async def _time_middle_pages(self) -> list[float]:
        cursor = None
        for _ in range(len(self.sessions) // _PAGE // 2):
            cursor = (await self.catalog.sessions.get_page(_PAGE, cursor)).next_cursor
        return await self._repeat(lambda: self.gateways[0].page(_PAGE, cursor))

    async def _sum_tokens(self) -> None:
        await self.catalog.sessions.get_tenant_tokens("")

    async def _find_orphans(self) -> None:
        await self.catalog.page_refs.get_orphaned()

    async def _time_starts(self) -> list[float]:
        durations = []
        for _ in range(3):
            pool = await build_pool(self.backend, self.plan, self.addresses)
            service = SessionService(pool, self.catalog, ServiceLimits())
            durations.append(await _time(service.start()))
        return durations

    async def _count_commands(self) -> float:
        """Return the commands per turn of an open session, less those of the idle processes."""
        gateway, session = self._choose()
        await run_turn(gateway, session)
        before, started = self.backend.commands(), time.monotonic()
        await asyncio.sleep(_QUIET_SECONDS)
        idle = (self.backend.commands() - before) / (time.monotonic() - started)
        before, started = self.backend.commands(), time.monotonic()
        for _ in range(self.plan.repetitions):
            await run_turn(gateway, session)
        background = idle * (time.monotonic() - started)
        return max(0.0, self.backend.commands() - before - background) / self.plan.repetitions

    def _size_per_session(self) -> float:
        return self.backend.bytes_used() / len(self.sessions)

    async def _measure_memory(self) -> float:
        """Return the bytes that stay in a gateway for each further session that it has served."""
        sessions = self.rng.sample(self.sessions, min(len(self.sessions), 2 * _SERVED))
        half = len(sessions) // 2
        tracemalloc.start()
        try:
            before = await self._serve(sessions[:half])
            after = await self._serve(sessions[half:])
            return max(0.0, after - before) / (len(sessions) - half)
        finally:
            tracemalloc.stop()

    async def _serve(self, sessions: Sequence[str]) -> int:
        """Run a turn of each session in one gateway; return the bytes that are allocated then."""
        for session in sessions:
            await run_turn(self.gateways[0], session)
        await asyncio.sleep(_QUIET_SECONDS)  # calls that have ended leave their memory
        gc.collect()
        return tracemalloc.get_traced_memory()[0]


async def run_turn(gateway: SessionService, session: str) -> None:
    """Run a turn of 33 tokens and an answer of one, to its end."""
    async for _ in gateway.turn(session, TurnRequest((TEXT,), sampling=Sampling(8))):
        pass


async def build_pool(backend: Backend, plan: Plan, addresses: Sequence[str]) -> WorkerPool:
    """Connect a gateway's pool to the workers, as its registry lists them."""
    if backend.url is None:
        return await WorkerPool.start(StaticRegistry(addresses), WireSettings())
    return await WorkerPool.start(
        RedisRegistry(redis_client(backend.url), plan.namespace), WireSettings()
    )


@asynccontextmanager
async def gateways(backend: Backend, plan: Plan, addresses: Sequence[str]) -> AsyncIterator[Fleet]:
    """Start the gateways. A SQLite catalog has one, which owns the file."""
    catalog = await backend.open()
    count = 1 if backend.url is None else plan.gateways
    services = []
    for _ in range(count):
        pool = await build_pool(backend, plan, addresses)
        own = catalog if backend.url is None else await backend.open()
        service = SessionService(pool, own, ServiceLimits())
        pool.on_join(service.worker_joined)
        await service.start()
        services.append(service)
    try:
        yield Fleet(backend, plan, services, catalog, addresses, [], random.Random(plan.seed))
    finally:
        for service in services:
            await service.stop()


async def _time(operation: Awaitable[object]) -> float:
    started = time.perf_counter()
    await operation
    return time.perf_counter() - started
