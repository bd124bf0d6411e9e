"""Tool calls and repairs in a catalog: commits of both do not overwrite each other."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvrecall.domain.errors import UnknownSession
from kvrecall.domain.messages import ToolCall
from kvrecall.domain.repairs import due_repairs
from kvrecall.domain.reports import MemoryReport, RepairReport
from kvrecall.domain.sessions.session import Session
from kvrecall.domain.sessions.state_machine import SessionState
from kvrecall.domain.settings.session import RepairTrigger
from kvrecall.domain.tool_calls import CallStatus, ToolOutput
from services.catalog.base import Catalog
from services.catalog.records import REPAIRS_RETAINED, RepairCommit, RepairDetails, TurnCommit

MakeSession = Callable[..., Session]
MakeTurn = Callable[..., TurnCommit]


async def test_a_turn_with_calls_begins_a_pause_and_the_next_turn_ends_it(
    catalog: Catalog,
    make_session: MakeSession,
    make_turn: MakeTurn,
    calls: tuple[ToolCall, ToolCall],
) -> None:
    await catalog.sessions.create(make_session("s"), b"", None)
    await catalog.turns.commit(make_turn("s", 1, *calls), 1, None)
    session = await catalog.sessions.get("s")
    assert session.committed_state is SessionState.PAUSED
    assert [made.call for made in session.outstanding] == list(calls)
    await catalog.turns.commit(
        replace(make_turn("s", 2), inline_results={"a": "r", "b": "q"}), 1, None
    )
    assert (await catalog.sessions.get("s")).calls == ()
    consumed = await catalog.tool_calls.get("s", "b")
    assert (consumed.status, consumed.result, consumed.consumed_in_turn) == (
        CallStatus.COMPLETED,
        "q",
        2,
    )


async def test_a_repair_and_a_report_of_the_same_call_do_not_overwrite_each_other(
    catalog: Catalog,
    make_session: MakeSession,
    make_turn: MakeTurn,
    calls: tuple[ToolCall, ToolCall],
    memory: MemoryReport,
    repair: RepairReport,
) -> None:
    await catalog.sessions.create(make_session("s"), b"", None)
    await catalog.turns.commit(make_turn("s", 1, *calls), 1, None)
    before = await catalog.sessions.get("s")
    await catalog.repairs.commit(
        "s", RepairCommit(due_repairs(before)[0], b"repaired", repair, memory), 1
    )
    reported = replace(before.calls[0], status=CallStatus.FAILED, result="no", batch=1)
    await catalog.tool_calls.commit("s", reported, 1, None)
    after = await catalog.sessions.get("s")
    signal = reported.call.signal
    at = after.calls[0].last_event_at
    assert after.calls[0] == replace(reported, call_signal=signal).stamped(at)
    assert (after.repairs, await catalog.sessions.get_worker_state("s")) == ((repair,), b"repaired")
    assert [due.position for due in due_repairs(after)] == [1, -1]


async def test_a_refused_repair_is_marked_as_done_and_keeps_the_worker_state(
    catalog: Catalog,
    make_session: MakeSession,
    make_turn: MakeTurn,
    calls: tuple[ToolCall, ToolCall],
) -> None:
    await catalog.sessions.create(make_session("s"), b"", None)
    await catalog.turns.commit(make_turn("s", 1, calls[0]), 1, None)
    await catalog.repairs.commit(
        "s", RepairCommit(due_repairs(await catalog.sessions.get("s"))[0]), 1
    )
    assert due_repairs(await catalog.sessions.get("s")) == []
    assert await catalog.sessions.get_worker_state("s") == b"state 1"


async def test_repair_reports_belong_to_the_pause_they_ran_in(
    catalog: Catalog,
    make_session: MakeSession,
    make_turn: MakeTurn,
    calls: tuple[ToolCall, ToolCall],
    memory: MemoryReport,
    repair: RepairReport,
) -> None:
    await catalog.sessions.create(make_session("s"), b"", None)
    await catalog.turns.commit(make_turn("s", 1, *calls), 1, None)
    for due in due_repairs(await catalog.sessions.get("s")):
        await catalog.repairs.commit("s", RepairCommit(due, b"", repair, memory), 1)
    assert len((await catalog.sessions.get("s")).repairs) == 2
    await catalog.turns.commit(make_turn("s", 2), 1, None)
    assert (await catalog.sessions.get("s")).repairs == ()


async def test_a_call_comes_back_as_it_was_reported(
    catalog: Catalog,
    make_session: MakeSession,
    make_turn: MakeTurn,
    calls: tuple[ToolCall, ToolCall],
) -> None:
    await catalog.sessions.create(make_session("s"), b"", None)
    await catalog.turns.commit(make_turn("s", 1, *calls), 1, None)
    made = (await catalog.sessions.get("s")).calls[1]
    output = ToolOutput(2, 3, 3, 1, 2, 3)
    reported = replace(made, started=True, arguments='{"n": 3}', output=output, delta_due=1)
    await catalog.tool_calls.commit("s", reported, 1, None)
    found = await catalog.tool_calls.get("s", "b")
    assert found == reported.stamped(found.last_event_at)
    assert (found.running.arguments, found.call) == ('{"n": 3}', calls[1])
    assert found.last_event_at >= made.last_event_at > 0
    assert (made.output.first_event_at, found.output.first_event_at) == (0.0, found.last_event_at)
    await catalog.tool_calls.commit("s", found, 1, None)
    again = await catalog.tool_calls.get("s", "b")
    assert again.output.first_event_at == found.last_event_at <= again.last_event_at


async def test_pieces_of_output_are_read_up_to_the_first_missing_one(
    catalog: Catalog,
    make_session: MakeSession,
    make_turn: MakeTurn,
    calls: tuple[ToolCall, ToolCall],
) -> None:
    await catalog.sessions.create(make_session("s"), b"", None)
    await catalog.turns.commit(make_turn("s", 1, *calls), 1, None)
    one, other = (await catalog.sessions.get("s")).calls
    for index, text in ((1, "b"), (0, "é"), (3, "\0"), (2, ""), (5, "f")):
        await catalog.tool_calls.commit("s", one, 1, None, (index, text))
    await catalog.tool_calls.commit("s", other, 1, None, (4, "of the other"))
    read = catalog.tool_calls.get_pieces
    assert await read("s", one, 0, 99) == ("é", "b", "", "\0")
    assert await read("s", one, 1, 2) == ("b", "")
    assert await read("s", one, 5, 99) == ("f",)
    assert await read("s", one, 4, 99) == await read("s", one, 6, 99) == ()
    assert await read("s", other, 4, 1) == ("of the other",)
    assert await read("unknown", one, 0, 9) == ()


async def test_each_kind_of_repair_marks_its_own_signal_as_done(
    catalog: Catalog,
    make_session: MakeSession,
    make_turn: MakeTurn,
    calls: tuple[ToolCall, ToolCall],
    memory: MemoryReport,
    repair: RepairReport,
) -> None:
    await catalog.sessions.create(make_session("s"), b"", None)
    await catalog.turns.commit(make_turn("s", 1, *calls), 1, None)
    grown = replace((await catalog.sessions.get("s")).calls[0], delta_due=4)
    await catalog.tool_calls.commit("s", grown, 1, None)
    reported = replace(
        (await catalog.sessions.get("s")).calls[1], status=CallStatus.COMPLETED, result="r", batch=1
    )
    await catalog.tool_calls.commit("s", reported, 1, None)
    order = []
    while due := due_repairs(await catalog.sessions.get("s")):
        order.append((due[0].trigger, due[0].position))
        await catalog.repairs.commit("s", RepairCommit(due[0], b"", repair, memory), 1)
    on_call = RepairTrigger.TOOL_CALL
    on_output = RepairTrigger.TOOL_DELTA
    on_result = RepairTrigger.TOOL_RESULT
    assert order == [(on_call, 0), (on_call, 1), (on_output, 0), (on_result, -1)]


async def test_the_last_output_is_due_until_a_repair_used_it(
    catalog: Catalog,
    make_session: MakeSession,
    make_turn: MakeTurn,
    calls: tuple[ToolCall, ToolCall],
    memory: MemoryReport,
    repair: RepairReport,
) -> None:
    await catalog.sessions.create(
        make_session("s", repair_on=frozenset({RepairTrigger.LAST_OUTPUT})), b"", None
    )
    await catalog.turns.commit(make_turn("s", 1), 1, None)
    (due,) = due_repairs(await catalog.sessions.get("s"))
    assert due.output == 2
    await catalog.repairs.commit("s", RepairCommit(due, b"", repair, memory), 1)
    assert due_repairs(await catalog.sessions.get("s")) == []
    await catalog.turns.commit(make_turn("s", 2), 1, None)
    assert len(due_repairs(await catalog.sessions.get("s"))) == 1
    await catalog.turns.commit(make_turn("s", 3, *calls), 1, None)
    assert (await catalog.sessions.get("s")).output_due == 0


async def test_the_latest_repairs_are_retained_newest_first_with_promoted_positions(
    catalog: Catalog,
    make_session: MakeSession,
    make_turn: MakeTurn,
    calls: tuple[ToolCall, ToolCall],
    memory: MemoryReport,
    repair: RepairReport,
) -> None:
    await catalog.sessions.create(make_session("s"), b"", None)
    await catalog.sessions.create(make_session("other"), b"", None)
    await catalog.turns.commit(
        replace(make_turn("s", 1, *calls), repaired=RepairDetails("hello", (1, 2**31))), 1, None
    )
    (due, *_) = due_repairs(await catalog.sessions.get("s"))
    for number in range(REPAIRS_RETAINED):
        details = RepairDetails(f"signal {number}", (number,))
        await catalog.repairs.commit("s", RepairCommit(due, b"", repair, memory, details), 1)
    found = await catalog.repairs.get_latest("s", 100)
    assert [record.number for record in found] == list(range(REPAIRS_RETAINED + 1, 1, -1))
    assert (found[0].turn, found[0].details.signal) == (2, f"signal {REPAIRS_RETAINED - 1}")
    assert (found[0].report, found[-1].details.positions) == (repair, (0,))
    assert await catalog.repairs.get_latest("s", 2) == found[:2]
    assert await catalog.repairs.get_latest("other", 2) == []
    with pytest.raises(UnknownSession):
        await catalog.repairs.get_latest("x", 2)


async def test_a_turn_s_own_repair_is_stored_with_that_turn(
    catalog: Catalog, make_session: MakeSession, make_turn: MakeTurn, repair: RepairReport
) -> None:
    await catalog.sessions.create(make_session("s"), b"", None)
    await catalog.turns.commit(
        replace(make_turn("s", 1), repaired=RepairDetails("hello", (1, 2**31))), 1, None
    )
    (record,) = await catalog.repairs.get_latest("s", 9)
    assert (record.turn, record.report, record.details) == (
        1,
        repair,
        RepairDetails("hello", (1, 2**31)),
    )
    assert (await catalog.sessions.get("s")).repairs == ()


async def test_idle_sessions_have_a_pending_call_without_a_recent_event(
    catalog: Catalog,
    make_session: MakeSession,
    make_turn: MakeTurn,
    calls: tuple[ToolCall, ToolCall],
) -> None:
    for id in ("s", "answered", "consumed"):
        await catalog.sessions.create(make_session(id), b"", None)
        await catalog.turns.commit(make_turn(id, 1, calls[0]), 1, None)
    call = (await catalog.sessions.get("answered")).calls[0]
    await catalog.tool_calls.commit(
        "answered", replace(call, status=CallStatus.FAILED, result="no", batch=1), 1, None
    )
    await catalog.turns.commit(
        replace(make_turn("consumed", 2), inline_results={"a": "r"}), 1, None
    )
    last_event_at = (await catalog.sessions.get("s")).calls[0].last_event_at
    assert await catalog.tool_calls.get_idle_sessions(last_event_at) == ["s"]
    assert await catalog.tool_calls.get_idle_sessions(last_event_at - 0.001) == []
