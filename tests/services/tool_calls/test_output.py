"""Pieces of tool output: what they add up to, and that the last one costs no more than the first."""

from dataclasses import replace
from itertools import count, takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrecall.domain.errors import LimitExceeded
from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.messages import ToolCall
from kvrecall.domain.repairs import SIGNAL_CHARACTERS, due_repairs
from kvrecall.domain.reports import MemoryReport
from kvrecall.domain.sessions.session import Session
from kvrecall.domain.settings.session import SessionSettings
from kvrecall.domain.tool_calls import PendingCall, summarize_pieces
from kvrecall.domain.tool_events import ToolEvent, ToolEventType, apply_event, get_piece_index
from services.repairs.runner import read_signal

SESSION = Session("s", 1, SessionSettings(64, 8, "snapkv"), 0.0, 0.0, 1, MemoryReport())


def delta(text: str, index: int | None = None) -> ToolEvent:
    return ToolEvent(ToolEventType.DELTA, "c1", text, index=index)


@pytest.fixture
def settings() -> ServiceLimits:
    return ServiceLimits(queue_seconds=5, drain_seconds=5, max_output_pieces=130)


@pytest.fixture
async def paused(harness, paused: str) -> str:
    """The paused session, once it has repaired itself on its call."""
    await harness.wait_until_idle(paused)
    return paused


@given(
    st.lists(st.tuples(st.none() | st.integers(0, 7), st.text(max_size=6)), max_size=12),
    st.integers(1, 12),
)
def test_the_numbers_of_an_output_are_those_of_its_pieces(
    deltas: list[tuple[int | None, str]], signal_bytes: int
) -> None:
    limits = ServiceLimits(delta_signal_bytes=signal_bytes)
    pieces: dict[int, str] = {}
    call = PendingCall(1, 0, ToolCall("c1", "look", "{}"))
    for index, text in deltas:
        event = delta(text, index)
        at = get_piece_index(call, event)
        before = call
        call = apply_event(SESSION, call, delta(pieces.get(at, text), index), limits, pieces)
        assert (call is before) == (at in pieces)
        pieces.setdefault(at, text)
        whole = "".join(pieces[each] for each in takewhile(pieces.__contains__, count()))
        assert call.output == summarize_pieces(pieces, call.delta_due)
        assert len(whole) - call.delta_due == call.output.recent_characters
        assert call.output.recent_bytes < max(signal_bytes, call.delta_due / 4)


async def test_the_last_piece_of_an_output_costs_what_the_first_one_did(
    harness, paused: str
) -> None:
    steps = 0

    def step() -> int:
        nonlocal steps
        steps += 1
        return 0

    database = harness.catalog._database
    costs = []
    for index in range(130):
        steps = 0
        await database.read(lambda db: db.set_progress_handler(step, 10))
        await harness.service.event(paused, delta("x", index))
        await database.read(lambda db: db.set_progress_handler(None, 0))
        costs.append(steps)
    assert sum(costs[110:]) <= 1.5 * sum(costs[10:30])
    assert await harness.get_output(paused, "c1") == "x" * 130


async def test_the_number_of_pieces_is_bounded(harness, paused: str) -> None:
    for index in range(130):
        await harness.service.event(paused, delta("", index))
    with pytest.raises(LimitExceeded) as caught:
        await harness.service.event(paused, delta("", 130))
    assert caught.value.details == {"field": "delta", "limit": 130}
    again = await harness.service.event(paused, delta("", 129))
    assert not again.late


async def test_the_end_of_a_long_output_is_the_signal_of_its_repair(harness, paused: str) -> None:
    pieces = {index: f"{index:04}" + "é" * 400 for index in range(100)}
    for index in (*range(50, 100), *range(50)):
        await harness.service.event(paused, delta(pieces[index], index))
    await harness.wait_until_idle(paused)
    session = await harness.catalog.sessions.get(paused)
    whole = "".join(pieces.values())
    assert due_repairs(session) == []
    (call,) = session.calls
    assert call.delta_repaired == len(whole)
    signals = [text for text in harness.worker.call_log if text.startswith("tool_delta: ")]
    assert signals[-1] == f"tool_delta: {whole[-SIGNAL_CHARACTERS:]}"


async def test_a_signal_ends_where_its_repair_was_due(harness, paused: str) -> None:
    for index in range(70):
        await harness.service.event(paused, delta(f"<{index}>" * 9, index))
    await harness.wait_until_idle(paused)
    session = await harness.catalog.sessions.get(paused)
    whole = await harness.get_output(paused, "c1")
    (due,) = due_repairs(_with_due(session, 1000))
    assert await read_signal(harness.catalog, session, due) == whole[:1000]


def _with_due(session: Session, reach: int) -> Session:
    (call,) = session.calls
    return replace(session, calls=(replace(call, delta_due=reach, delta_repaired=0),))
