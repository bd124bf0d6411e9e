"""A gateway's memory is bounded by settings, not by the sessions that it has ever seen."""

import gc
import tracemalloc

import pytest

from kvrecall.domain.events import EventBus, SessionForgotten
from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.messages import Message
from kvrecall.domain.reports import MemoryReport
from kvrecall.domain.sessions.request import CreateSession, resolve_settings
from kvrecall.domain.sessions.session import Session
from kvrecall.protocol.convert import worker_info_from_wire
from kvrecall_server.testing import StubWorker
from services.sessions.manager import SessionManager

HELLO = Message("user", "hello there")


@pytest.fixture
def settings() -> ServiceLimits:
    return ServiceLimits(idle_sessions=3, drain_seconds=5)


async def test_the_longest_unused_session_is_forgotten_and_comes_back_by_itself(harness) -> None:
    forgotten: list[str] = []
    harness.service.observe(
        lambda event: (
            forgotten.append(event.session) if isinstance(event, SessionForgotten) else None
        )
    )
    sessions = [await harness.session() for _ in range(3)]
    for session in sessions:
        assert (await harness.say(session, HELLO)).turn == 1
    await harness.say(sessions[0], HELLO)
    sessions.append(await harness.session())
    assert forgotten == harness.worker.forgotten == [sessions[1]]
    outcomes = [await harness.say(session, HELLO) for session in sessions]
    assert [outcome.turn for outcome in outcomes] == [3, 2, 2, 1]
    assert [outcome.memory.length for outcome in outcomes] == [12, 8, 8, 4]


async def test_a_session_in_use_is_not_forgotten(harness) -> None:
    session = await harness.session()
    held = await harness.hold_turn(session)
    for _ in range(10):
        await harness.session()
    assert session not in harness.worker.forgotten
    harness.worker.gates["token"].set()
    assert (await harness.outcome(held)).turn == 1


async def test_an_idle_session_takes_less_than_four_kibibytes(harness) -> None:
    limits = ServiceLimits()
    worker = StubWorker()
    manager = SessionManager(harness.catalog, worker, EventBus(), limits)
    info = worker_info_from_wire(await worker.describe())
    settings = resolve_settings(CreateSession(budget=64, repair_rows=8), info, limits)
    report = MemoryReport(budget=64)
    count = 1000
    gc.collect()
    tracemalloc.start()
    for number in range(count):
        manager.activate(Session(f"s_{number:024x}", 1, settings, 0.0, 0.0, 0, report))
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held / count < 4096
