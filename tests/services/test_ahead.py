"""In a pause the next prompt is prefilled as far as its tools have said it."""

import asyncio
from collections.abc import Callable
from typing import Any

from kvrecall.domain.codes import ErrorCode
from kvrecall.domain.errors import WorkerRefused
from kvrecall.domain.messages import Message
from kvrecall.domain.tool_events import ToolEvent, ToolEventType

LINE = "rain and sun " * 40  # 120 words, 520 bytes


async def pause(harness: Any, call: Callable[[str, str], Any], *ids: str, **settings: Any) -> str:
    """A session that waits for calls."""
    session: str = await harness.session(**{"repair_rows": 0} | settings)
    await harness.pause(session, *(call(each, "Bern") for each in ids))
    await harness.wait_until_idle(session)
    return session


async def put_out(harness: Any, session: str, call_id: str, text: str = LINE) -> None:
    await harness.service.event(session, ToolEvent(ToolEventType.DELTA, call_id, text))
    await harness.wait_until_idle(session)


def ahead(harness: Any) -> list[int]:
    """Words of each prefill."""
    return [int(each[6:]) for each in harness.worker.call_log if each.startswith("ahead ")]


async def test_output_is_prefilled_as_it_grows(harness: Any, call: Any) -> None:
    session = await pause(harness, call, "c1")
    for _ in range(20):
        await put_out(harness, session, "c1")
    found = ahead(harness)
    assert found[0] == 240, "a block's worth of text"
    assert found == sorted(set(found))
    assert 5 < len(found) < 15, "not each piece"
    await harness.complete_call(session, "c1", LINE * 20 + LINE * 4)
    await harness.wait_until_idle(session)
    assert ahead(harness)[-1] == 24 * 120
    await harness.say(session)
    assert harness.worker.call_log.count("open 0") == 1, "it was not opened again"


async def test_results_are_prefilled_in_the_order_of_their_calls(harness: Any, call: Any) -> None:
    session = await pause(harness, call, "c1", "c2", "c3")
    await harness.complete_call(session, "c2", LINE * 3)
    await harness.wait_until_idle(session)
    assert ahead(harness) == [], "the first message is not known"
    await put_out(harness, session, "c1", LINE * 4)
    assert ahead(harness) == [4 * 120]
    await harness.complete_call(session, "c1", LINE * 4)
    await harness.wait_until_idle(session)
    assert ahead(harness) == [4 * 120, 7 * 120]


async def test_a_turn_ends_it_and_waits_for_its_end(harness: Any, call: Any) -> None:
    harness.worker.gates["ahead"] = asyncio.Event()
    session = await pause(harness, call, "c1")
    await harness.service.event(session, ToolEvent(ToolEventType.DELTA, "c1", LINE * 3))
    await harness.worker.reached["ahead"].wait()
    outcome = await harness.say(session, Message("tool", LINE * 3, tool_call_id="c1"))
    assert outcome.finish_reason
    assert ahead(harness) == [3 * 120]


async def test_a_session_whose_repairs_change_rows_before_the_turn_does_not(
    harness: Any, call: Any
) -> None:
    session = await pause(harness, call, "c1", repair_rows=4)
    await put_out(harness, session, "c1", LINE * 4)
    assert ahead(harness) == []


async def test_a_session_with_a_memory_does_not(harness: Any, call: Any) -> None:
    """What the memory brings back comes before the tool's result."""
    session = await pause(harness, call, "c1", method="icecache", remember="ann")
    await put_out(harness, session, "c1", LINE * 4)
    assert ahead(harness) == []


async def test_a_refusal_leaves_the_pause_as_it_was(harness: Any, call: Any) -> None:
    session = await pause(harness, call, "c1")
    harness.worker.faults["prefill_ahead"] = WorkerRefused(
        ErrorCode.BAD_MESSAGES, "not in this template"
    )
    await put_out(harness, session, "c1", LINE * 4)
    assert (await harness.catalog.sessions.get(session)).committed_state == "paused"
    assert (await harness.say(session, Message("tool", "sun", tool_call_id="c1"))).output_tokens
