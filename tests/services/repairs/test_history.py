"""What repairs brought back, with the text around it."""

from collections.abc import Callable

import pytest

from kvrecall.domain.errors import UnknownSession
from kvrecall.domain.messages import Message
from services.repairs.history import runs
from services.repairs.runner import MAX_SIGNAL_CHARACTERS


@pytest.mark.parametrize(
    ("positions", "expected"),
    [((), []), ((4,), [(4, 5)]), ((0, 1, 2), [(0, 3)]), ((0, 2, 3, 9), [(0, 1), (2, 4), (9, 10)])],
)
def test_positions_that_follow_each_other_are_one_run(
    positions: tuple[int, ...], expected: list
) -> None:
    assert runs(positions) == expected


async def test_repairs_are_told_newest_first_with_their_signals_and_passages(
    harness, call: Callable
) -> None:
    session = await harness.session()
    harness.worker.script = [[call("c1", "Bern")]]
    await harness.say(session, Message("user", "one two three four"))
    await harness.wait_until_idle(session)
    await harness.say(session, Message("tool", "rain", tool_call_id="c1"), repair=True)
    own, early = await harness.service.repairs(session, 10)
    assert (early.record.turn, early.record.report.trigger, early.record.details.signal) == (
        2,
        "tool_call",
        'weather {"city": "Bern"}',
    )
    (passage,) = early.passages
    assert (passage.start, passage.stop) == (1, 3)
    assert (passage.before, passage.promoted) == ("user", "one two")
    assert passage.after == "three four tool rain ok"
    assert (own.record.turn, own.record.report.trigger, own.record.details.signal) == (
        2,
        "turn",
        "rain",
    )
    assert [(each.before, each.promoted) for each in own.passages] == [
        ("", "user one"),
        ("user one two", "three"),
    ]
    assert [told.record.number for told in await harness.service.repairs(session, 1)] == [2]


async def test_a_long_signal_is_cut(harness, call: Callable) -> None:
    session = await harness.session()
    await harness.say(session, Message("user", "x" * 2 * MAX_SIGNAL_CHARACTERS), repair=True)
    (told,) = await harness.service.repairs(session, 10)
    assert len(told.record.details.signal) == MAX_SIGNAL_CHARACTERS


async def test_without_repairs_nothing_is_told(harness) -> None:
    assert await harness.service.repairs(await harness.session(), 10) == []
    with pytest.raises(UnknownSession):
        await harness.service.repairs("nobody", 10)
