"""Reports of tool calls: idempotent, refused when unknown, kept until their call is committed."""

import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from kvrecall.domain.errors import (
    LimitExceeded,
    ResultConflict,
    UnknownCall,
    UnknownSession,
)
from kvrecall.domain.events import ServiceEvent, ToolCallEnded
from kvrecall.domain.messages import Message
from kvrecall.domain.tool_calls import CallStatus
from kvrecall.domain.tool_events import ToolEvent, ToolEventType
from kvrecall.domain.turn_request import TurnRequest
from services.catalog.records import IdempotencyKey
from services.streams.turn import ToolCallEmitted

HELLO = Message("user", "hello")
WAITING = {"wait_for_repairs": True}
EARLY = 'tool_call: weather {"city": "Bern"}'


async def test_reports_of_a_call_are_idempotent(harness, paused: str) -> None:
    first = await harness.complete_call(paused, "c1", "rain")
    again = await harness.complete_call(paused, "c1", "rain")
    assert replace(again, state=first.state) == first
    await harness.wait_until_idle(paused)
    assert harness.repairs == [EARLY, "tool_result: tool rain"]
    for other in (
        ToolEvent(ToolEventType.COMPLETED, "c1", "sun"),
        ToolEvent(ToolEventType.FAILED, "c1", "rain"),
    ):
        with pytest.raises(ResultConflict):
            await harness.service.event(paused, other)
    await harness.say(paused)
    late = await harness.complete_call(paused, "c1", "rain")
    assert (late.status, late.outstanding, late.late) == (CallStatus.COMPLETED, (), True)
    assert len(harness.repairs) == 2


async def test_a_call_may_be_announced_and_report_partial_output(harness, paused: str) -> None:
    await harness.service.event(paused, ToolEvent(ToolEventType.STARTED, "c1"))
    for text in ("light ", "rain"):
        receipt = await harness.service.event(paused, ToolEvent(ToolEventType.DELTA, "c1", text))
    assert (receipt.status, receipt.outstanding) == (CallStatus.PENDING, ("c1",))
    stored = await harness.catalog.tool_calls.get(paused, "c1")
    assert (stored.started, stored.result) == (True, None)
    assert await harness.get_output(paused, "c1") == "light rain"
    await harness.wait_until_idle(paused)
    assert harness.repairs == [EARLY]


async def test_a_delta_with_a_key_is_appended_once(harness, paused: str) -> None:
    key = IdempotencyKey("event", "k", "body")
    for _ in range(2):
        await harness.service.event(paused, ToolEvent(ToolEventType.DELTA, "c1", "rain "), key)
    assert await harness.get_output(paused, "c1") == "rain "


async def test_reports_of_what_is_unknown_or_too_long_are_refused(harness, paused: str) -> None:
    with pytest.raises(UnknownCall):
        await harness.complete_call(paused, "c9", "rain")
    with pytest.raises(UnknownSession):
        await harness.complete_call("nobody", "c1", "rain")
    with pytest.raises(LimitExceeded):
        await harness.complete_call(paused, "c1", "x" * (1 << 21))
    assert (await harness.catalog.tool_calls.get(paused, "c1")).result is None


async def test_a_result_that_comes_before_the_commit_of_its_call_waits_for_it(
    harness, call: Callable
) -> None:
    session = await harness.session()
    harness.worker.script = [[call("c1", "Bern")]]
    stream = harness.service.turn(session, TurnRequest((HELLO,)))
    while not isinstance(await anext(stream), ToolCallEmitted):
        pass
    receipt = await harness.complete_call(session, "c1", "rain")
    assert receipt.status is CallStatus.COMPLETED


async def test_observers_learn_how_long_a_tool_ran(harness, paused: str) -> None:
    heard: list[ServiceEvent] = []
    harness.service.observe(heard.append)
    called = await harness.catalog.tool_calls.get(paused, "c1")
    before = time.time()
    await harness.service.event(paused, ToolEvent(ToolEventType.STARTED, "c1"))
    started = time.time()
    await harness.service.event(paused, ToolEvent(ToolEventType.STARTED, "c1"))
    await harness.service.event(paused, ToolEvent(ToolEventType.DELTA, "c1", "light"))
    await harness.service.event(paused, ToolEvent(ToolEventType.FAILED, "c1", "no rain"))
    await harness.service.event(paused, ToolEvent(ToolEventType.FAILED, "c1", "no rain"))
    (ended,) = [event for event in heard if isinstance(event, ToolCallEnded)]
    assert (ended.session, ended.call, ended.name, ended.failed) == (paused, "c1", "weather", True)
    assert called.last_event_at <= before <= ended.began <= started <= ended.ended


async def test_a_tool_whose_start_was_not_reported_ran_since_its_calls_last_event(
    harness, paused: str
) -> None:
    heard: list[ServiceEvent] = []
    harness.service.observe(heard.append)
    called = await harness.catalog.tool_calls.get(paused, "c1")
    await harness.complete_call(paused, "c1", "rain")
    (ended,) = [event for event in heard if isinstance(event, ToolCallEnded)]
    assert (ended.began, ended.failed) == (called.last_event_at, False)
