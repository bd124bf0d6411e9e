"""Gateways over one catalog and simulated workers: filled with sessions, then measured."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from benchmarks.scale.backends import Backend
from benchmarks.scale.histories import (
    MESSAGES,
    add_long_session,
    build_digest,
    build_unknown,
)
from benchmarks.scale.memory import traced
from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.messages import Message, Sampling
from kvrecall.domain.page_ids import join_ids, make_random_id
from kvrecall.domain.reports import MemoryReport, TurnOutcome
from kvrecall.domain.sessions.request import CreateSession, resolve_settings
from kvrecall.domain.sessions.session import Session, Turn
from kvrecall.domain.turn_request import TurnRequest
from kvrecall.protocol.v1 import worker_pb2 as pb
from kvrecall_server.app.redis import redis_client
from kvrecall_server.reporting.results import Row, speed_row
from services.catalog.base import Catalog
from services.catalog.records import TurnCommit
from services.cluster.pool import WorkerPool
from services.cluster.registry import RedisRegistry, Registry, StaticRegistry
from services.cluster.settings import WireSettings
from services.conversations.continuation import Conversation
from services.lifecycle.forks import ForkRequest
from services.reading.search import SessionQuery
from services.service import SessionService

TEXT = Message("user", " ".join(f"word{number}" for number in range(32)))
ANSWER = Message("assistant", "ok")
# Pages of a session that is filled in, of four tokens each as the simulated workers', and its message.
_PAGES = 30
_FILLED = Message("user", " ".join(f"word{number}" for number in range(4 * _PAGES)))
_PROMPT_TOKENS = 4 * _PAGES + 1
# Catalog writes under way at once while sessions are filled in.
_WRITERS = 64
_PAGE = 200
# One session in so many belongs to a tenant of its own, all others to one tenant.
_TENANT_EVERY = 10
_LIFETIME_SECONDS = 7 * 86_400.0
_SWEPT = 100
_LONG_SESSIONS = 4
# Pages of a worker's list that a sweep looks for.
_LISTED = 4096
_QUIET_SECONDS = 3.0
# Sessions before and after which a gateway's memory is compared.
_SERVED = 400
_STARTS = 3


@dataclass(frozen=True)
class Sizes:
    """Sizes of a measurement: `repetitions` of each operation, `state_bytes` of a session's state."""

    seed: int
    gateways: int
    workers: int
    repetitions: int
    state_bytes: int
    namespace: str = "kvrecall"


@dataclass(frozen=True)
class Gateway:
    """A gateway's service, and the catalog that it has open."""

    service: SessionService
    catalog: Catalog


@dataclass
class Fleet:
    """Gateways in this process, and the ids of the sessions that were filled in.

    `created` are sessions that operations have made; they are deleted after each measurement. `long`
    are the histories of those of many messages.
    """

    backend: Backend
    plan: Sizes
    gateways: list[Gateway]
    addresses: Sequence[str]
    rng: random.Random
    sessions: list[str] = field(default_factory=list)
    created: list[str] = field(default_factory=list)
    long: list[Conversation] = field(default_factory=list)

    async def fill(self, count: int) -> None:
        """Add sessions with one turn each until there are `count`, by the catalog's own writes.

        Neither a gateway nor a worker has them open.
        """
        catalog = self.gateways[0].catalog
        length = _PROMPT_TOKENS + 1
        state = pb.SessionState(length=length, selection=bytes(self.plan.state_bytes))
        permits = asyncio.Semaphore(_WRITERS)

        async def add(number: int) -> str:
            async with permits:
                name = f"s_{number:024x}"
                tenant = "" if number % _TENANT_EVERY else f"tenant {number}"
                session = self._build_session(name, _LIFETIME_SECONDS, tenant)
                memory = replace(session.memory, length=length)
                await catalog.sessions.create(session, b"", None)
                sizes = (_PROMPT_TOKENS, 1)
                outcome = TurnOutcome(name, 1, ANSWER, "stop", *sizes, memory, (), {})
                turn = Turn(name, 1, (_FILLED,), tuple(range(length)), outcome, sizes)
                commit = TurnCommit(
                    turn,
                    state.SerializeToString(),
                    page_ids=join_ids([make_random_id() for _ in range(_PAGES)]),
                    history=build_digest(number),
                    lifetime=_LIFETIME_SECONDS,
                )
                await catalog.turns.commit(commit, 1, None)
                return name

        added = (add(number) for number in range(len(self.sessions), count))
        self.sessions += await asyncio.gather(*added)

    def _build_session(self, name: str, lifetime: float | None = None, tenant: str = "") -> Session:
        """Build a session without a turn, which no worker has."""
        request = CreateSession(tenant=tenant, expires_after_seconds=lifetime)
        settings = resolve_settings(request, self.gateways[0].service.info, ServiceLimits())
        now, memory = time.time(), MemoryReport()
        return Session(name, 1, settings, now, now, 0, memory, worker="gone")

    async def measure(self) -> list[Row]:
        """Measure every operation with the sessions that there are now."""
        # First: operations add turns and sessions.
        size = self.backend.bytes_used() / len(self.sessions)
        rows = [self._row("catalog", "size per session", "bytes", [size])]
        self.long = [await self._add_long_session() for _ in range(_LONG_SESSIONS)]
        for operation, run in self._operations().items():
            rows.append(self._row(operation, "duration", "seconds", await run()))
        if self.backend.commands is not None:
            count = await self._count_commands(self.backend.commands)
            rows.append(self._row("turn", "Redis commands", "count", [count]))
        # Last: a gateway that has just started has no session open.
        rows.append(self._row("start of a gateway", "duration", "seconds", await self._restart()))
        sessions = self.rng.sample(self.sessions, len(self.sessions))
        cold, served = sessions[: self.plan.repetitions], sessions[self.plan.repetitions :]
        durations = [await _time(run_turn(self.gateways[0].service, each)) for each in cold]
        rows.append(self._row("turn, session not open", "duration", "seconds", durations))
        memory = await self._measure_memory(served[: 2 * _SERVED])
        rows.append(self._row("gateway", "memory per session it has served", "bytes", [memory]))
        for session in self.created:
            await self.gateways[0].service.delete(session)
        self.created.clear()
        return rows

    def _operations(self) -> dict[str, Callable[[], Awaitable[list[float]]]]:
        operations: dict[str, Callable[[], Awaitable[list[float]]]] = {
            "create": lambda: self._repeat(self._create),
            "turn, session open": self._time_warm_turns,
            "fork": lambda: self._repeat(self._fork),
            "delete": self._time_deletions,
            "list, first page": lambda: self._repeat(self._list_page),
            "list, page in the middle": self._time_middle_pages,
            "tokens of a tenant": lambda: self._repeat(self._sum_tokens),
            "search for dead pages, none": lambda: self._repeat(self._find_dead),
            "search for expired sessions, none": lambda: self._repeat(self._find_expired),
            "search for expired sessions, one": self._time_expiry,
            f"sweep of {_LISTED} pages": lambda: self._repeat(self._sweep),
            f"look-up of {MESSAGES} messages": lambda: self._time_look_ups(known=True),
            f"look-up of {MESSAGES} messages, none held": lambda: self._time_look_ups(known=False),
        }
        if len(self.gateways) > 1:
            operations["turn, session of another gateway"] = self._time_changes_of_gateway
        return operations

    def _row(self, operation: str, metric: str, unit: str, values: Sequence[float]) -> Row:
        return speed_row(
            f"{self.backend.name}: {operation}",
            metric,
            unit,
            values,
            sessions=len(self.sessions),
            gateways=len(self.gateways),
            workers=self.plan.workers,
        )

    async def _repeat(self, operation: Callable[[], Awaitable[object]]) -> list[float]:
        return [await _time(operation()) for _ in range(self.plan.repetitions)]

    def _choose(self) -> tuple[SessionService, str]:
        return self.rng.choice(self.gateways).service, self.rng.choice(self.sessions)

    async def _create(self) -> None:
        gateway = self.rng.choice(self.gateways).service
        self.created.append((await gateway.create(CreateSession())).id)

    async def _time_changes_of_gateway(self) -> list[float]:
        durations = []
        for _ in range(self.plan.repetitions):
            before, after = self.rng.sample(self.gateways, 2)
            session = self.rng.choice(self.sessions)
            await run_turn(before.service, session)
            durations.append(await _time(run_turn(after.service, session)))
        return durations

    async def _time_warm_turns(self) -> list[float]:
        durations = []
        for _ in range(self.plan.repetitions):
            gateway, session = self._choose()
            await run_turn(gateway, session)
            durations.append(await _time(run_turn(gateway, session)))
        return durations

    async def _fork(self) -> None:
        gateway, session = self._choose()
        self.created.append((await gateway.fork(session, ForkRequest())).id)

    async def _time_deletions(self) -> list[float]:
        durations = []
        for _ in range(self.plan.repetitions):
            gateway = self.rng.choice(self.gateways).service
            session = (await gateway.create(CreateSession())).id
            await run_turn(gateway, session)
            durations.append(await _time(gateway.delete(session)))
        return durations

    async def _list_page(self) -> None:
        await self.gateways[0].service.reading.search(SessionQuery(_PAGE), "")

    async def _time_middle_pages(self) -> list[float]:
        cursor = None
        for _ in range(len(self.sessions) // _PAGE // 2):
            page = await self.gateways[0].catalog.sessions.get_page(_PAGE, cursor)
            cursor = page.next_cursor
        query = SessionQuery(_PAGE, cursor)
        return await self._repeat(lambda: self.gateways[0].service.reading.search(query, ""))

    async def _sum_tokens(self) -> None:
        await self.gateways[0].catalog.sessions.get_use("")

    async def _find_dead(self) -> None:
        await self.gateways[0].catalog.pages.get_dead(_SWEPT)

    async def _find_expired(self) -> int:
        return len(await self.gateways[0].catalog.expiry.get_expired(_SWEPT))

    async def _time_expiry(self) -> list[float]:
        """Time searches that find one session."""
        catalog = self.gateways[0].catalog
        session = self._build_session(self._new_name(), lifetime=0.0)
        await catalog.sessions.create(session, b"", None)
        durations = await self._repeat(self._find_expired)
        if await self._find_expired() != 1:
            raise RuntimeError("the search did not find the expired session")
        await catalog.sessions.delete(session.id, None)
        return durations

    async def _sweep(self) -> None:
        ids = [make_random_id() for _ in range(_LISTED)]
        if await self.gateways[0].catalog.pages.find_unknown(ids) != ids:
            raise RuntimeError("the catalog knows pages of no session")

    def _new_name(self) -> str:
        return f"n_{self.rng.getrandbits(96):024x}"

    async def _add_long_session(self) -> Conversation:
        """Add a session of many messages, to be deleted after the measurement."""
        session = self._build_session(self._new_name())
        self.created.append(session.id)
        gateway = self.gateways[0]
        conversations = gateway.service.conversations
        return await add_long_session(gateway.catalog, conversations, session, self.rng)

    async def _time_look_ups(self, known: bool) -> list[float]:
        """Time the way from a request's history to the session that holds it."""
        durations = []
        for _ in range(self.plan.repetitions):
            gateway, conversation = self.rng.choice(self.gateways), self.rng.choice(self.long)
            if not known:
                conversation = build_unknown(self.rng, conversation)
            started = time.perf_counter()
            held = (await gateway.service.conversations.look_up(conversation)).place
            durations.append(time.perf_counter() - started)
            if (held is not None) != known or (held is not None and held.number != MESSAGES):
                raise RuntimeError("the look-up did not find what is held")
        return durations

    async def _restart(self) -> list[float]:
        """Stop a gateway and start it again, some times; return the seconds of the starts."""
        durations = []
        for _ in range(_STARTS):
            await self.gateways[0].service.stop()
            started = time.perf_counter()
            self.gateways[0] = await start_gateway(self.backend, self.plan, self.addresses)
            durations.append(time.perf_counter() - started)
        return durations

    async def _count_commands(self, commands: Callable[[], int]) -> float:
        """Return the commands per turn of an open session, less those of the idle processes."""
        gateway, session = self._choose()
        await run_turn(gateway, session)
        before, started = commands(), time.monotonic()
        await asyncio.sleep(_QUIET_SECONDS)
        idle = (commands() - before) / (time.monotonic() - started)
        before, started = commands(), time.monotonic()
        for _ in range(self.plan.repetitions):
            await run_turn(gateway, session)
        background = idle * (time.monotonic() - started)
        return (commands() - before - background) / self.plan.repetitions

    async def _measure_memory(self, sessions: Sequence[str]) -> float:
        """Return the bytes that stay in a gateway for each further session that it has served.

        It has none of the sessions open. The first half loads what all sessions share.
        """
        half = len(sessions) // 2
        with traced() as traced_bytes:
            await self._serve(sessions[:half])
            before = traced_bytes()
            await self._serve(sessions[half:])
            return (traced_bytes() - before) / (len(sessions) - half)

    async def _serve(self, sessions: Sequence[str]) -> None:
        """Run a turn of each session in one gateway."""
        for session in sessions:
            await run_turn(self.gateways[0].service, session)
        await asyncio.sleep(_QUIET_SECONDS)  # calls that have ended leave their memory


async def run_turn(gateway: SessionService, session: str) -> None:
    """Run a turn of 33 tokens and an answer of one, to its end."""
    async for _ in gateway.turn(session, TurnRequest((TEXT,), sampling=Sampling(8))):
        pass


async def start_gateway(backend: Backend, plan: Sizes, addresses: Sequence[str]) -> Gateway:
    """Open the catalog, connect to the workers and start to serve, as `kvrecall gateway` does."""
    catalog = await backend.open()
    registry: Registry = StaticRegistry(addresses)
    if backend.url is not None:
        registry = RedisRegistry(redis_client(backend.url), plan.namespace)
    pool = await WorkerPool.start(registry, WireSettings(), catalog.id)
    service = SessionService(pool, catalog, ServiceLimits())
    pool.on_join(service.worker_joined)
    await service.start()
    return Gateway(service, catalog)


@asynccontextmanager
async def gateways(backend: Backend, plan: Sizes, addresses: Sequence[str]) -> AsyncIterator[Fleet]:
    """Start the gateways. A SQLite catalog has one, which owns the file."""
    count = 1 if backend.url is None else plan.gateways
    started = [await start_gateway(backend, plan, addresses) for _ in range(count)]
    try:
        yield Fleet(backend, plan, started, addresses, random.Random(plan.seed))
    finally:
        for gateway in started:
            await gateway.service.stop()


async def _time(operation: Awaitable[object]) -> float:
    started = time.perf_counter()
    await operation
    return time.perf_counter() - started
