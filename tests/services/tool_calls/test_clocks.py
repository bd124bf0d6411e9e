"""Clocks that are wrong time out no tool call that is waited for."""

import asyncio
import time

import pytest

from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.tool_calls import CallStatus
from kvrecall.domain.tool_events import ToolEvent, ToolEventType
from services.catalog.sqlite.storage.database import Database
from services.tool_calls.timeouts import ToolCallTimeouts

HOUR = 3600.0
COMPLETED = ToolEvent(ToolEventType.COMPLETED, "c1", "rain")


@pytest.fixture
def settings() -> ServiceLimits:
    return ServiceLimits(queue_seconds=5, drain_seconds=5, pause_seconds=HOUR)


@pytest.fixture
def timeouts(harness) -> ToolCallTimeouts:
    return ToolCallTimeouts(harness.service._context)


async def get_status(harness, session: str) -> CallStatus:
    return (await harness.catalog.tool_calls.get(session, "c1")).status


async def test_a_process_whose_clock_is_ahead_times_out_nothing(
    harness, paused: str, timeouts: ToolCallTimeouts, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = time.time
    monkeypatch.setattr(time, "time", lambda: true() + 1.1 * HOUR)
    for _ in range(3):
        await timeouts.sweep()
    monkeypatch.undo()
    assert await get_status(harness, paused) is CallStatus.PENDING
    assert (await harness.service.event(paused, COMPLETED)).status is CallStatus.COMPLETED


async def test_a_call_times_out_at_the_second_sweep_that_finds_it_idle(
    harness, paused: str, timeouts: ToolCallTimeouts, monkeypatch: pytest.MonkeyPatch
) -> None:
    await harness.wait_until_idle(paused)
    ahead = 1.1 * HOUR
    original = Database.now
    monkeypatch.setattr(Database, "now", lambda self: original(self) + ahead)
    await timeouts.sweep()
    assert await get_status(harness, paused) is CallStatus.PENDING
    ahead = 0.0
    await timeouts.sweep()
    ahead = 1.1 * HOUR
    await timeouts.sweep()
    assert await get_status(harness, paused) is CallStatus.PENDING
    await timeouts.sweep()
    assert await get_status(harness, paused) is CallStatus.TIMED_OUT


async def test_an_event_between_two_sweeps_keeps_the_call(
    harness, paused: str, timeouts: ToolCallTimeouts, monkeypatch: pytest.MonkeyPatch
) -> None:
    await harness.wait_until_idle(paused)
    original = Database.now
    monkeypatch.setattr(Database, "now", lambda self: original(self) + 1.1 * HOUR)
    await timeouts.sweep()
    await harness.service.event(paused, ToolEvent(ToolEventType.STARTED, "c1"))
    await asyncio.sleep(0)
    monkeypatch.setattr(Database, "now", lambda self: original(self) + 2.3 * HOUR)
    await timeouts.sweep()
    assert await get_status(harness, paused) is CallStatus.PENDING
