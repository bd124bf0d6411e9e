"""A worker that does as it is told.

For timing, failures and cancellations that no real worker makes on command.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from kvrecall.domain.events import ServiceEvent, TurnFinished
from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.messages import Message, Sampling
from kvrecall.domain.page_ids import split_ids
from kvrecall.domain.reports import TurnOutcome
from kvrecall.domain.sessions.request import CreateSession
from kvrecall.domain.settings.session import PAUSE_TRIGGERS
from kvrecall.domain.tool_events import EventReceipt, ToolEvent, ToolEventType
from kvrecall.domain.turn_request import TurnRequest
from kvrecall.protocol.v1 import worker_pb2 as pb
from kvrecall_server.testing import StubWorker
from services.catalog.sqlite.catalog import SqliteCatalog
from services.context import ServiceContext
from services.pages.collector import PageCollector
from services.pages.sweep import PageSweep
from services.service import SessionService
from services.streams.turn import TurnStream

_HELLO = Message("user", "hello there")


class Harness:
    """A service over a scripted worker and a real catalog in a file, and how to restart it."""

    def __init__(self, path: Path, settings: ServiceLimits) -> None:
        self.path = path
        self.settings = settings
        self.worker = StubWorker()
        self.service: SessionService
        self.catalog: SqliteCatalog

    async def start(self) -> None:
        """Open the catalog and start a service over it."""
        self.catalog = await SqliteCatalog.open(self.path)
        self.service = SessionService(self.worker, self.catalog, self.settings)
        await self.service.start()

    async def crash(self) -> None:
        """Lose the process: the worker's memory, running repairs, everything but the file."""
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            if task.get_name().startswith(
                ("background ", "maintenance ", "sweep", "page collector")
            ):
                task.cancel()
                await asyncio.wait({task})
        await self.catalog.close()
        before = self.worker
        self.worker = StubWorker(pages=before.pages)
        await self.start()

    def build_sweep(self) -> PageSweep:
        """A sweep over the catalog and the worker, beside the service's own."""
        return PageSweep(ServiceContext.create(self.catalog, self.worker, self.settings))

    async def collect(self) -> None:
        """Delete the dead pages."""
        await self.build_collector().sweep()

    def build_collector(self) -> PageCollector:
        """A collector over the catalog and the worker, beside the service's own."""
        return PageCollector(ServiceContext.create(self.catalog, self.worker, self.settings))

    async def session(self, **settings: Any) -> str:
        """A new session of budget 64, which is repaired in pauses alone."""
        default = {"budget": 64, "repair_rows": 8, "repair_on": PAUSE_TRIGGERS, "seed": 1}
        values: dict[str, Any] = default | settings
        return (await self.service.create(CreateSession(**values))).id

    def begin(self, session: str, *messages: Message, **options: Any) -> TurnStream:
        """Send a turn and return its stream."""
        values: dict[str, Any] = {"sampling": Sampling(50), **options}
        return self.service.turn(session, TurnRequest(messages or (_HELLO,), **values))

    async def hold_turn(self, session: str) -> TurnStream:
        """Send a turn that waits before its first token, and return its stream."""
        self.worker.gates["token"] = asyncio.Event()
        self.worker.reached["token"].clear()
        stream = self.begin(session)
        await self.worker.reached["token"].wait()
        return stream

    async def outcome(self, stream: TurnStream) -> TurnOutcome:
        """Read a turn's stream to its end and return the outcome."""
        ended = [progress async for progress in stream][-1]
        assert isinstance(ended, TurnFinished)
        return ended.outcome

    async def say(self, session: str, *messages: Message, **options: Any) -> TurnOutcome:
        """Run a turn to its end: what it came to."""
        values: dict[str, Any] = {"sampling": Sampling(50), **options}
        stream = self.service.turn(session, TurnRequest(messages, **values))
        ended = [progress async for progress in stream][-1]
        assert isinstance(ended, TurnFinished)
        return ended.outcome

    def hear(self) -> list[ServiceEvent]:
        """A list that gets every event from now on."""
        heard: list[ServiceEvent] = []
        self.service.observe(heard.append)
        return heard

    async def selection(self, session: str) -> bytes:
        """The committed selection."""
        return pb.SessionState.FromString(
            await self.catalog.sessions.get_worker_state(session)
        ).selection

    async def get_output(self, session: str, call: str) -> str:
        """A tool's output so far: the pieces up to the first missing one."""
        found = await self.catalog.tool_calls.get(session, call)
        return "".join(await self.catalog.tool_calls.get_pieces(session, found, 0, 1000))

    async def get_pages(self, session: str) -> list[bytes]:
        """The ids of a session's pages, as committed."""
        return list(split_ids(await self.catalog.sessions.get_page_ids(session)))

    @property
    def repairs(self) -> list[str]:
        """The signals of the repairs so far, in order."""
        return [entry for entry in self.worker.call_log if not entry.startswith("open")]

    async def pause(self, session: str, *calls: pb.ToolCall) -> None:
        """Run a turn that ends on tool calls."""
        self.worker.script = [list(calls)]
        outcome = await self.say(session, Message("user", "hello"))
        assert outcome.finish_reason == "tool_calls"

    async def complete_call(self, session: str, call: str, result: str) -> EventReceipt:
        """Report a tool call's result."""
        event = ToolEvent(ToolEventType.COMPLETED, call, result)
        return await self.service.event(session, event)

    async def wait_until_idle(self, session: str) -> None:
        """Wait until no background work of the session runs."""
        tasks = [task for task in asyncio.all_tasks() if task.get_name() == f"background {session}"]
        for task in tasks:
            await task


@pytest.fixture
def settings() -> ServiceLimits:
    return ServiceLimits(queue_seconds=5, drain_seconds=5)


@pytest.fixture
async def harness(tmp_path: Path, settings: ServiceLimits) -> AsyncIterator[Harness]:
    harness = Harness(tmp_path / "catalog.db", settings)
    await harness.start()
    yield harness
    for gate in harness.worker.gates.values():
        gate.set()
    await harness.service.stop()


@pytest.fixture
def call() -> Callable[[str, str], pb.ToolCall]:
    """A tool call with an id and the city it asks about."""
    return lambda id, city: pb.ToolCall(id=id, name="weather", arguments=f'{{"city": "{city}"}}')


@pytest.fixture
async def paused(harness: Harness, call: Callable[[str, str], pb.ToolCall]) -> str:
    """A session that has just asked for the weather in Bern."""
    session = await harness.session()
    await harness.pause(session, call("c1", "Bern"))
    return session


@pytest.fixture
def user() -> Callable[[str], Message]:
    return lambda text: Message("user", text)
