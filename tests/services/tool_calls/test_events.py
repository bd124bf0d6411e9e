"""Reports of tool calls: in any order, twice, too late, and what each makes of the call."""

import asyncio
from collections.abc import Callable
from itertools import permutations

import pytest

from kvrecall.domain.errors import InvalidRequest, LimitExceeded, ResultConflict
from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.messages import Message
from kvrecall.domain.tool_calls import CallStatus
from kvrecall.domain.tool_events import EventReceipt, ToolEvent, ToolEventType

CALL = 'tool_call: weather {"city": "Bern"}'


def started(arguments: str | None = None) -> ToolEvent:
    return ToolEvent(ToolEventType.STARTED, "c1", arguments=arguments)


def delta(text: str, index: int | None = None) -> ToolEvent:
    return ToolEvent(ToolEventType.DELTA, "c1", text, index=index)


def completed(result: str) -> ToolEvent:
    return ToolEvent(ToolEventType.COMPLETED, "c1", result)


@pytest.fixture
def settings() -> ServiceLimits:
    return ServiceLimits(
        queue_seconds=5, drain_seconds=5, delta_signal_bytes=8, max_result_bytes=40
    )


@pytest.fixture
async def paused(harness, paused: str) -> str:
    """The paused session, once it has repaired itself on its call."""
    await harness.wait_until_idle(paused)
    return paused


@pytest.fixture
def report(harness, paused: str) -> Callable:
    """Send a report of the paused session's call and let its repairs end."""

    async def send(event: ToolEvent) -> EventReceipt:
        receipt = await harness.service.event(paused, event)
        await harness.wait_until_idle(paused)
        return receipt

    return send


async def test_what_the_client_really_runs_is_repaired_on(harness, report: Callable) -> None:
    await report(started('{"city":"Rome"}'))
    assert harness.repairs == [CALL, 'tool_call: weather {"city":"Rome"}']
    await report(started('{"city":"Rome"}'))
    assert len(harness.repairs) == 2


async def test_arguments_that_say_the_same_are_not_repaired_on_again(
    harness, report: Callable
) -> None:
    await report(started('{ "city" : "Bern" }'))
    await report(started())
    assert harness.repairs == [CALL]


async def test_arguments_that_come_while_the_first_repair_runs_are_repaired_on_after_it(
    harness, call: Callable
) -> None:
    session = await harness.session()
    harness.worker.script = [[call("c1", "Bern")]]
    harness.worker.gates["repair"] = asyncio.Event()
    await harness.say(session, Message("user", "hello"))
    await harness.worker.reached["repair"].wait()
    await harness.service.event(session, started('{"city":"Rome"}'))
    harness.worker.gates["repair"].set()
    await harness.wait_until_idle(session)
    assert harness.repairs == [CALL, 'tool_call: weather {"city":"Rome"}']


@pytest.mark.parametrize("arguments", ["", "x", "[]", '"city"', "null"])
async def test_arguments_are_an_object(report: Callable, arguments: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await report(started(arguments))
    assert caught.value.details["field"] == "arguments"


async def test_output_is_repaired_on_whenever_enough_of_it_has_come(
    harness, report: Callable
) -> None:
    for text in ("four", "five", "six ", "more", "éé"):
        await report(delta(text))
    assert harness.repairs[1:] == ["tool_delta: fourfive", "tool_delta: fourfivesix more"]


async def test_an_output_that_waits_for_its_repair_is_skipped_once_the_result_is_there(
    harness, call: Callable
) -> None:
    session = await harness.session()
    harness.worker.script = [[call("c1", "Bern")]]
    harness.worker.gates["repair"] = asyncio.Event()
    await harness.say(session, Message("user", "hello"))
    await harness.worker.reached["repair"].wait()
    await harness.service.event(session, delta("a long output"))
    await harness.service.event(session, completed("a long output"))
    harness.worker.gates["repair"].set()
    await harness.wait_until_idle(session)
    assert harness.repairs == [CALL, "tool_result: tool a long output"]


async def test_pieces_are_joined_in_their_order_whatever_order_they_come_in(
    harness, call: Callable
) -> None:
    pieces = [delta("in ", 0), delta("any ", 1), delta("order", 2)]
    for order in permutations(pieces):
        session = await harness.session()
        harness.worker.script = [[call("c1", "Bern")]]
        await harness.say(session, Message("user", "hello"))
        for event in (*order, order[0]):
            await harness.service.event(session, event)
        assert await harness.get_output(session, "c1") == "in any order"


async def test_what_comes_after_a_missing_piece_is_held_back(
    harness, paused: str, report: Callable
) -> None:
    await report(delta("first", 0))
    await report(delta("third, and much of it", 2))
    assert await harness.get_output(paused, "c1") == "first"
    assert harness.repairs == [CALL]
    await report(delta("second", 1))
    assert harness.repairs[1:] == ["tool_delta: firstsecondthird, and much of it"]


async def test_a_piece_that_comes_again_with_another_text_is_a_conflict(report: Callable) -> None:
    await report(delta("one", 3))
    with pytest.raises(ResultConflict, match="piece 3"):
        await report(delta("two", 3))


async def test_pieces_without_an_index_come_after_what_is_there(
    harness, paused: str, report: Callable
) -> None:
    for event in (delta("a"), delta("a"), delta("b", 2), delta("c")):
        await report(event)
    assert await harness.get_output(paused, "c1") == "aabc"


async def test_no_number_of_pieces_is_over_the_limit(report: Callable) -> None:
    for index in range(40):
        await report(delta("", index))
    with pytest.raises(LimitExceeded) as caught:
        await report(delta("x", 41))
    assert caught.value.details == {"field": "delta", "limit": 40}


async def test_a_result_without_a_start_is_a_result_and_what_comes_after_it_is_late(
    harness, paused: str, report: Callable
) -> None:
    receipt = await report(completed("rain"))
    assert (receipt.status, receipt.late) == (CallStatus.COMPLETED, False)
    before = await harness.catalog.tool_calls.get(paused, "c1")
    for event in (started(), started('{"city": "Rome"}'), delta("ra", 0), delta("ra")):
        receipt = await report(event)
        assert (receipt.status, receipt.late) == (CallStatus.COMPLETED, True)
    assert await harness.catalog.tool_calls.get(paused, "c1") == before
    assert harness.repairs == [CALL, "tool_result: tool rain"]


async def test_after_the_turn_that_said_it_a_result_is_late_and_another_one_a_conflict(
    harness, paused: str, report: Callable
) -> None:
    await harness.say(paused, Message("tool", "rain", tool_call_id="c1"))
    before = await harness.catalog.sessions.get(paused)
    for event in (started(), delta("ra"), completed("rain")):
        assert (await report(event)).late
    with pytest.raises(ResultConflict):
        await report(completed("sun"))
    assert await harness.catalog.sessions.get(paused) == before
