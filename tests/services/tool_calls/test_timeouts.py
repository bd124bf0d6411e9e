"""Pauses that never end."""

import asyncio
from collections.abc import Callable

import pytest

from kvrecall.domain.errors import ResultConflict
from kvrecall.domain.events import PauseTimedOut, ServiceEvent
from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.messages import Message
from kvrecall.domain.tool_calls import CallStatus
from kvrecall.domain.tool_events import ToolEvent, ToolEventType

HELLO = Message("user", "hello")


def limits(pause_seconds: float) -> ServiceLimits:
    return ServiceLimits(queue_seconds=5, drain_seconds=5, pause_seconds=pause_seconds)


@pytest.fixture
def settings() -> ServiceLimits:
    return limits(0.2)


async def paused(harness, *calls) -> str:
    """A session that waits for tool calls."""
    session = await harness.session()
    await harness.pause(session, *calls)
    return session


async def given_up(harness, session: str, call: str = "c1") -> None:
    """Wait until the service has given the call up."""
    for _ in range(1000):
        if (await harness.catalog.tool_calls.get(session, call)).status is CallStatus.TIMED_OUT:
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"{call} was not given up")


def completed(call: str, result: str) -> ToolEvent:
    return ToolEvent(ToolEventType.COMPLETED, call, result)


@pytest.mark.parametrize("settings", [limits(2.0)])
async def test_a_call_that_nothing_is_heard_of_fails_and_the_model_is_told_so(
    harness, call: Callable
) -> None:
    """The result of the other call comes long before the end of the pause."""
    heard: list[ServiceEvent] = []
    harness.service.observe(heard.append)
    session = await paused(harness, call("c1", "Bern"), call("c2", "Rome"))
    await harness.service.event(session, completed("c2", "sun"))
    await given_up(harness, session)
    for _ in range(1000):  # it is published once the catalog has it
        if PauseTimedOut(session, ("c1",)) in heard:
            break
        await asyncio.sleep(0.01)
    assert PauseTimedOut(session, ("c1",)) in heard
    found, _ = await harness.service.get(session)
    assert [each.status for each in found.calls] == [CallStatus.TIMED_OUT, CallStatus.COMPLETED]
    await harness.say(session)
    (_, said) = await harness.catalog.turns.get_after(session, 0, 10)
    given_up_with = "no result: this tool call timed out after 2 seconds without an event"
    assert [message.content for message in said.messages] == [given_up_with, "sun"]


async def test_a_call_of_a_session_that_is_found_by_its_history_never_times_out(
    harness, call: Callable
) -> None:
    matched = await harness.session(matched=True)
    await harness.pause(matched, call("c0", "Oslo"))
    other = await paused(harness, call("c1", "Bern"))
    await given_up(harness, other)
    assert (await harness.catalog.tool_calls.get(matched, "c0")).status is CallStatus.PENDING


async def test_its_result_comes_too_late_and_is_told_why(harness, call: Callable) -> None:
    session = await paused(harness, call("c1", "Bern"))
    await given_up(harness, session)
    with pytest.raises(ResultConflict, match="timed out"):
        await harness.service.event(session, completed("c1", "rain"))
    with pytest.raises(ResultConflict, match="timed out"):
        await harness.say(session, Message("tool", "rain", tool_call_id="c1"))
    late = await harness.service.event(session, ToolEvent(ToolEventType.DELTA, "c1", "ra"))
    assert (late.status, late.late) == (CallStatus.TIMED_OUT, True)


async def test_no_repair_is_conditioned_on_a_failure_of_ours(harness, call: Callable) -> None:
    session = await paused(harness, call("c1", "Bern"), call("c2", "Rome"))
    await given_up(harness, session, "c2")
    await harness.wait_until_idle(session)
    assert [said.partition(":")[0] for said in harness.worker.call_log[1:]] == [
        "tool_call",
        "tool_call",
    ]


async def test_a_tool_that_still_reports_is_not_given_up(harness, call: Callable) -> None:
    session = await paused(harness, call("c1", "Bern"))
    for _ in range(10):
        await harness.service.event(session, ToolEvent(ToolEventType.DELTA, "c1", "."))
        await asyncio.sleep(0.05)
    assert (await harness.catalog.tool_calls.get(session, "c1")).status is CallStatus.PENDING


async def test_a_restart_goes_by_the_time_at_which_the_pause_began(harness, call: Callable) -> None:
    session = await paused(harness, call("c1", "Bern"))
    await harness.service.stop()
    await asyncio.sleep(0.25)
    await harness.start()
    await given_up(harness, session)
    await harness.say(session)
    assert (await harness.catalog.sessions.get(session)).turns == 2
