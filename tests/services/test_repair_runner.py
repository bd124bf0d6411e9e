"""Repairs between turns.

Which run, when and in which order, independently of timing and of crashes.
"""

import asyncio
from collections.abc import Callable

import pytest

from kvrecall.domain.codes import ErrorCode
from kvrecall.domain.errors import (
    CallsOutstanding,
    CatalogError,
    LimitExceeded,
    ResultConflict,
    ServiceError,
    UnknownCall,
    UnknownSession,
    WorkerLost,
    WorkerRefused,
)
from kvrecall.domain.events import RepairFailed, RepairFinished, ServiceEvent
from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.messages import Message, ToolCall
from kvrecall.domain.repairs import due_repairs
from kvrecall.domain.session_settings import RepairTrigger
from kvrecall.domain.state_machine import SessionState
from kvrecall.domain.tool_calls import CallStatus
from kvrecall.domain.tool_events import ToolEvent, ToolEventType
from kvrecall.domain.turn_request import TurnRequest
from kvrecall.protocol.v1 import worker_pb2 as pb
from services.catalog.records import IdempotencyKey
from services.turn_stream import ToolCallEmitted

HELLO = Message("user", "hello")
WAITING = {"wait_for_repairs": True}
EARLY = 'tool_call: weather {"city": "Bern"}'


def completed(call: str, result: str) -> ToolEvent:
    return ToolEvent(ToolEventType.COMPLETED, call, result)


def repairs(harness) -> list[str]:
    """The signals of the repairs so far, in order."""
    return [said for said in harness.worker.call_log if not said.startswith("open")]


async def pause(harness, session: str, *calls) -> None:
    """A turn that ends on tool calls."""
    harness.worker.script = [list(calls)]
    outcome = await harness.say(session, HELLO)
    assert outcome.finish_reason == "tool_calls"


@pytest.fixture
async def paused(harness, call: Callable) -> str:
    """A session that has just asked for the weather in Bern."""
    session = await harness.session()
    await pause(harness, session, call("c1", "Bern"))
    return session


async def test_a_call_starts_a_repair_by_itself(harness, paused: str) -> None:
    await harness.wait_until_idle(paused)
    assert repairs(harness) == [EARLY]
    session, state = await harness.service.get(paused)
    assert state is SessionState.PAUSED
    assert session.calls[0].call_signal == 'weather {"city": "Bern"}'
    assert session.memory.promoted_rows == 2


async def test_the_turn_is_acknowledged_before_the_repair_ends(harness, call: Callable) -> None:
    session = await harness.session()
    harness.worker.gates["repair"] = asyncio.Event()
    await pause(harness, session, call("c1", "Bern"))
    await harness.worker.reached["repair"].wait()
    assert (await harness.service.get(session))[1] is SessionState.REPAIRING
    harness.worker.gates["repair"].set()
    await harness.wait_until_idle(session)
    assert (await harness.service.get(session))[1] is SessionState.PAUSED


async def test_a_result_starts_a_second_repair_after_the_early_one(harness, call: Callable) -> None:
    session = await harness.session()
    harness.worker.gates["repair"] = asyncio.Event()
    await pause(harness, session, call("c1", "Bern"))
    await harness.worker.reached["repair"].wait()
    receipt = await harness.service.event(session, completed("c1", "rain"))
    assert (receipt.status, receipt.outstanding) == (CallStatus.COMPLETED, ())
    assert repairs(harness) == [EARLY]
    harness.worker.gates["repair"].set()
    await harness.wait_until_idle(session)
    assert repairs(harness) == [EARLY, "tool_result: tool rain"]


async def test_a_turn_that_asks_to_waits_for_the_repairs_and_reports_them(
    harness, call: Callable
) -> None:
    session = await harness.session()
    harness.worker.gates["repair"] = asyncio.Event()
    await pause(harness, session, call("c1", "Bern"))
    await harness.service.event(session, completed("c1", "rain"))
    turn = asyncio.create_task(harness.say(session, **WAITING))
    await harness.worker.reached["repair"].wait()
    assert not turn.done()
    harness.worker.gates["repair"].set()
    outcome = await turn
    assert [(repair.trigger, repair.truncated) for repair in outcome.repairs] == [
        ("tool_call", False),
        ("tool_result", False),
    ]
    assert (outcome.own_repair, outcome.repairs_skipped) == (None, 0)
    (_, said) = await harness.catalog.turns.get_after(session, 0, 10)
    assert said.messages == (Message("tool", "rain", tool_call_id="c1", name="weather"),)
    assert (await harness.service.get(session))[1] is SessionState.IDLE


async def test_another_turn_takes_what_the_repair_has_found_so_far_and_leaves_out_the_rest(
    harness, call: Callable
) -> None:
    session = await harness.session()
    harness.worker.gates["repair"] = asyncio.Event()
    await pause(harness, session, call("c1", "Bern"))
    await harness.worker.reached["repair"].wait()
    await harness.service.event(session, completed("c1", "rain"))
    outcome = await harness.say(session)
    (cut,) = outcome.repairs
    assert (cut.trigger, cut.truncated, cut.share_scanned, cut.in_pause) == (
        "tool_call",
        True,
        0.5,
        False,
    )
    assert outcome.repairs_skipped == 1
    assert repairs(harness) == [EARLY]
    await harness.wait_until_idle(session)
    assert due_repairs(await harness.catalog.sessions.get(session)) == []


class TestPatient:
    """A service that holds the repair on a result back for longer than any turn takes to come."""

    @pytest.fixture
    def settings(self) -> ServiceLimits:
        return ServiceLimits(result_delay_seconds=60)

    async def test_a_turn_that_follows_its_result_at_once_finds_no_repair_in_its_way(
        self, harness, paused: str
    ) -> None:
        await harness.wait_until_idle(paused)
        await harness.service.event(paused, completed("c1", "rain"))
        outcome = await harness.say(paused)
        assert repairs(harness) == [EARLY]
        assert [repair.trigger for repair in outcome.repairs] == ["tool_call"]
        assert outcome.repairs_skipped == 1


async def test_a_repair_that_was_not_begun_is_not_begun_for_a_turn(harness, call: Callable) -> None:
    session = await harness.session()
    harness.worker.faults["repair"] = WorkerLost("gone")
    await pause(harness, session, call("c1", "Bern"))
    await harness.wait_until_idle(session)
    outcome = await harness.say(session, Message("tool", "rain", tool_call_id="c1"))
    assert (outcome.repairs, outcome.repairs_skipped) == ((), 1)
    assert repairs(harness) == []


@pytest.mark.parametrize("how", ["cancelled", "failed"])
async def test_after_a_turn_that_came_to_nothing_what_is_due_goes_on(
    harness, call: Callable, how: str
) -> None:
    session = await harness.session()
    harness.worker.gates["repair"] = asyncio.Event()
    await pause(harness, session, call("c1", "Bern"))
    await harness.worker.reached["repair"].wait()
    await harness.service.event(session, completed("c1", "rain"))
    if how == "failed":
        harness.worker.faults["turn"] = WorkerLost("gone")
    else:
        harness.worker.gates["token"] = asyncio.Event()
    turn = asyncio.create_task(harness.say(session))
    if how == "cancelled":
        await harness.worker.reached["token"].wait()
        (running,) = harness.service._running
        running.cancel()
    with pytest.raises(ServiceError):
        await turn
    harness.worker.gates["repair"].set()
    await harness.wait_until_idle(session)
    assert repairs(harness) == [EARLY, "tool_result: tool rain"]
    assert (await harness.service.get(session))[1] is SessionState.PAUSED
    assert due_repairs(await harness.catalog.sessions.get(session)) == []


async def test_a_turn_that_goes_away_while_a_repair_ends_for_it_lets_the_others_run(
    harness, call: Callable
) -> None:
    session = await harness.session()
    hurried = asyncio.Event()
    harness.worker.stop_early = None
    harness.worker.gates["repair"] = asyncio.Event()

    async def deaf(request: object) -> None:
        hurried.set()

    harness.worker.stop_early = deaf
    await pause(harness, session, call("c1", "Bern"))
    await harness.worker.reached["repair"].wait()
    await harness.service.event(session, completed("c1", "rain"))
    turn = asyncio.create_task(harness.say(session))
    await hurried.wait()
    (running,) = harness.service._running
    running.cancel()
    with pytest.raises(ServiceError):
        await turn
    harness.worker.gates["repair"].set()
    await harness.wait_until_idle(session)
    assert repairs(harness) == [EARLY, "tool_result: tool rain"]


async def test_a_worker_that_cannot_be_hurried_does_not_fail_the_turn(
    harness, call: Callable
) -> None:
    session = await harness.session()
    harness.worker.gates["repair"] = asyncio.Event()
    harness.worker.faults["stop_early"] = WorkerLost("gone")
    await pause(harness, session, call("c1", "Bern"))
    await harness.worker.reached["repair"].wait()
    turn = asyncio.create_task(harness.say(session, Message("tool", "rain", tool_call_id="c1")))
    await asyncio.sleep(0.01)
    harness.worker.gates["repair"].set()
    assert [repair.truncated for repair in (await turn).repairs] == [False]


async def test_a_repair_that_ends_before_a_turn_comes_says_so(harness, paused: str) -> None:
    await harness.wait_until_idle(paused)
    outcome = await harness.say(paused, Message("tool", "rain", tool_call_id="c1"), repair=True)
    assert [(repair.trigger, repair.in_pause) for repair in outcome.repairs] == [
        ("tool_call", True),
        ("turn", False),
    ]


async def test_a_result_within_the_turn_repairs_on_its_path_only_if_the_turn_asks(
    harness, paused: str
) -> None:
    await harness.wait_until_idle(paused)
    outcome = await harness.say(paused, Message("tool", "rain", tool_call_id="c1"))
    assert [repair.trigger for repair in outcome.repairs] == ["tool_call"]
    assert (await harness.catalog.tool_calls.get(paused, "c1")).result == "rain"
    await pause(harness, paused, pb.ToolCall(id="c2", name="weather", arguments="{}"))
    await harness.wait_until_idle(paused)
    outcome = await harness.say(paused, Message("tool", "sun", tool_call_id="c2"), repair=True)
    assert [repair.trigger for repair in outcome.repairs] == ["tool_call", "turn"]


async def test_a_session_s_deadline_holds_for_each_of_its_repairs(harness, call: Callable) -> None:
    session = await harness.session(repair_seconds=0.25)
    await pause(harness, session, call("c1", "Bern"))
    await harness.wait_until_idle(session)
    await harness.say(session, Message("tool", "rain", tool_call_id="c1"), repair=True)
    assert [each.repair_seconds for each in harness.worker.options] == [0.25, 0.25]


async def test_how_a_session_repairs_is_told_to_the_worker(harness) -> None:
    session = await harness.session(repair_scan="exact", repair_settings='{"hops": 2}')
    spec = harness.worker.specs[session]
    assert (spec.repair_scan, spec.repair_settings) == ("exact", '{"hops": 2}')
    other = harness.worker.specs[await harness.session()]
    assert (other.repair_scan, other.repair_settings) == ("", "{}")


async def test_the_last_answer_is_a_signal_in_the_idle_time_before_the_next_turn(harness) -> None:
    session = await harness.session(repair_on=frozenset({RepairTrigger.LAST_OUTPUT}))
    harness.worker.script = ["the key hangs there", "yes"]
    harness.worker.gates["repair"] = asyncio.Event()
    await harness.say(session, HELLO)
    harness.worker.reached["repair"].clear()
    await harness.worker.reached["repair"].wait()
    assert (await harness.service.get(session))[1] is SessionState.REPAIRING
    harness.worker.gates["repair"].set()
    await harness.wait_until_idle(session)
    assert repairs(harness) == ["last_output: the key hangs there"]
    assert (await harness.service.get(session))[1] is SessionState.IDLE
    outcome = await harness.say(session, HELLO)
    assert [repair.trigger for repair in outcome.repairs] == ["last_output"]
    await harness.wait_until_idle(session)
    assert repairs(harness)[1:] == ["last_output: yes"]


async def test_nothing_was_said_so_nothing_is_a_signal(harness, call: Callable) -> None:
    session = await harness.session(repair_on=frozenset({RepairTrigger.LAST_OUTPUT}))
    await harness.say(session, HELLO, generate=False)
    await pause(harness, session, call("c1", "Bern"))
    await harness.wait_until_idle(session)
    assert repairs(harness) == []


async def test_a_last_answer_that_was_not_repaired_on_is_repaired_on_after_a_crash(harness) -> None:
    session = await harness.session(repair_on=frozenset({RepairTrigger.LAST_OUTPUT}))
    harness.worker.script = ["the key"]
    harness.worker.gates["repair"] = asyncio.Event()
    await harness.say(session, HELLO)
    await harness.worker.reached["repair"].wait()
    words = harness.worker.words
    await harness.crash()
    harness.worker.words = words
    outcome = await harness.say(session, HELLO, **WAITING)
    assert [repair.trigger for repair in outcome.repairs] == ["last_output"]


async def test_a_cancelled_turn_leaves_the_pause_as_it_was(harness, paused: str) -> None:
    await harness.wait_until_idle(paused)
    before = await harness.catalog.sessions.get(paused)
    harness.worker.gates["token"] = asyncio.Event()
    turn = asyncio.create_task(harness.say(paused, Message("tool", "rain", tool_call_id="c1")))
    await harness.worker.reached["token"].wait()
    (running,) = harness.service._running
    running.cancel()
    with pytest.raises(ServiceError):
        await turn
    assert await harness.catalog.sessions.get(paused) == before
    assert (await harness.service.get(paused))[1] is SessionState.PAUSED


async def test_each_arrival_repairs_with_all_results_so_far(harness, call: Callable) -> None:
    session = await harness.session()
    await pause(harness, session, call("c1", "Bern"), call("c2", "Rome"))
    await harness.service.event(session, completed("c2", "sun"))
    await harness.service.event(session, ToolEvent(ToolEventType.FAILED, "c1", "no such city"))
    await harness.wait_until_idle(session)
    assert repairs(harness) == [
        EARLY,
        'tool_call: weather {"city": "Rome"}',
        "tool_result: tool sun",
        "tool_result: tool no such city tool sun",
    ]


async def test_a_turn_with_calls_outstanding_is_refused_and_names_them(
    harness, call: Callable
) -> None:
    session = await harness.session()
    await pause(harness, session, call("c1", "Bern"), call("c2", "Rome"))
    await harness.service.event(session, completed("c1", "rain"))
    with pytest.raises(CallsOutstanding) as caught:
        await harness.say(session, HELLO)
    assert caught.value.details["calls"] == ["c2"]


async def test_recorded_calls_pause_as_if_the_model_had_asked(harness) -> None:
    session = await harness.session()
    recorded = Message("assistant", tool_calls=(ToolCall("c1", "weather", '{"city": "Bern"}'),))
    outcome = await harness.say(session, HELLO, recorded, generate=False)
    await harness.wait_until_idle(session)
    assert outcome.finish_reason == "appended"
    assert repairs(harness) == [EARLY]
    assert (await harness.service.get(session))[1] is SessionState.PAUSED


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"repair_rows": 0}, []),
        ({"repair_on": frozenset()}, []),
        ({"repair_on": frozenset({RepairTrigger.TOOL_CALL})}, [EARLY]),
        ({"repair_on": frozenset({RepairTrigger.TOOL_RESULT})}, ["tool_result: tool rain"]),
    ],
)
async def test_only_the_repairs_that_were_asked_for_run(
    harness, call: Callable, options: dict, expected: list[str]
) -> None:
    session = await harness.session(**options)
    await pause(harness, session, call("c1", "Bern"))
    await harness.service.event(session, completed("c1", "rain"))
    outcome = await harness.say(session, **WAITING)
    assert repairs(harness) == expected
    assert len(outcome.repairs) == len(expected)


async def conversation(harness, call: Callable, crashes: set[int], amid_repair: bool) -> bytes:
    """A pause with two calls, crashes after some of its steps, and the turn that ends it.

    The selection it ends in.
    """
    session = await harness.session()
    steps = (
        lambda: pause(harness, session, call("c1", "Bern"), call("c2", "Rome")),
        lambda: harness.service.event(session, completed("c2", "sun")),
        lambda: harness.service.event(session, completed("c1", "rain")),
    )
    for number, step in enumerate(steps):
        if number in crashes and amid_repair:
            await harness.wait_until_idle(session)
            harness.worker.gates["repair"] = asyncio.Event()
            harness.worker.reached["repair"].clear()
        await step()
        if number in crashes:
            if amid_repair:
                await harness.worker.reached["repair"].wait()
            await harness.crash()
    await harness.say(session, HELLO, **WAITING)
    return await harness.selection(session)


@pytest.mark.parametrize("crashes", [{0}, {1}, {2}, {0, 1}, {1, 2}, {0, 1, 2}])
@pytest.mark.parametrize("amid_repair", [True, False])
async def test_a_crash_in_a_pause_leads_to_the_same_selection_as_none(
    harness, call: Callable, crashes: set[int], amid_repair: bool
) -> None:
    undisturbed = await conversation(harness, call, set(), amid_repair=False)
    assert await conversation(harness, call, crashes, amid_repair) == undisturbed


async def test_a_repair_whose_commit_fails_is_run_again_from_what_was_committed(
    harness, call: Callable
) -> None:
    undisturbed = await conversation(harness, call, set(), amid_repair=False)
    commit = harness.catalog.repairs.commit

    async def fails_once(*args: object) -> None:
        harness.catalog.repairs.commit = commit
        raise CatalogError("no space left")

    harness.catalog.repairs.commit = fails_once
    assert await conversation(harness, call, set(), amid_repair=False) == undisturbed


async def test_reports_are_told_to_observers(harness, call: Callable) -> None:
    heard: list[ServiceEvent] = []
    harness.service.observe(heard.append)
    session = await harness.session()
    await pause(harness, session, call("c1", "Bern"))
    await harness.wait_until_idle(session)
    (finished,) = [observation for observation in heard if isinstance(observation, RepairFinished)]
    assert (finished.session, finished.report.trigger, finished.report.promoted) == (
        session,
        "tool_call",
        2,
    )


async def test_a_repair_that_fails_stays_due_and_a_turn_that_waits_runs_it(
    harness, call: Callable
) -> None:
    heard: list[ServiceEvent] = []
    harness.service.observe(heard.append)
    session = await harness.session()
    harness.worker.faults["repair"] = WorkerLost("gone")
    await pause(harness, session, call("c1", "Bern"))
    await harness.wait_until_idle(session)
    assert RepairFailed(session, "tool_call", "worker_lost", "gone", final=False) in heard
    outcome = await harness.say(session, Message("tool", "rain", tool_call_id="c1"), **WAITING)
    assert [repair.trigger for repair in outcome.repairs] == ["tool_call"]
    assert repairs(harness) == [EARLY]
    assert harness.worker.call_log[1] == "open 2"


async def test_a_repair_that_always_breaks_is_given_up_for_the_turn(harness, paused: str) -> None:
    await harness.wait_until_idle(paused)
    repairing = harness.worker.repair
    broken = []

    async def breaks(request: object) -> None:
        broken.append(request)
        raise WorkerLost("out of memory")

    harness.worker.repair = breaks
    await harness.service.event(paused, completed("c1", "rain"))
    await harness.wait_until_idle(paused)
    outcome = await harness.say(paused, **WAITING)
    assert [repair.trigger for repair in outcome.repairs] == ["tool_call"]
    assert (
        len(broken) == 3
    )  # in the background, by the turn, by the turn after the session was opened again
    harness.worker.repair = repairing


async def test_no_repair_is_given_up_while_the_worker_is_gone(harness, paused: str) -> None:
    await harness.wait_until_idle(paused)
    repairing = harness.worker.repair
    opening = harness.worker.open

    async def gone(request: object) -> None:
        raise WorkerLost("gone")

    harness.worker.repair = harness.worker.open = gone
    await harness.service.event(paused, completed("c1", "rain"))
    with pytest.raises(WorkerLost):
        await harness.say(paused, **WAITING)
    harness.worker.repair = repairing
    harness.worker.open = opening
    outcome = await harness.say(paused, **WAITING)
    assert [repair.trigger for repair in outcome.repairs] == ["tool_call", "tool_result"]


async def test_a_signal_that_is_refused_is_not_tried_again(harness, call: Callable) -> None:
    session = await harness.session()
    harness.worker.faults["repair"] = WorkerRefused(
        ErrorCode.TURN_TOO_LONG, "the signal is longer than a block"
    )
    await pause(harness, session, call("c1", "Bern"))
    await harness.wait_until_idle(session)
    outcome = await harness.say(session, Message("tool", "rain", tool_call_id="c1"), **WAITING)
    assert (outcome.repairs, outcome.repairs_skipped) == ((), 0)
    assert repairs(harness) == []


async def test_reports_of_a_call_are_idempotent(harness, paused: str) -> None:
    first = await harness.service.event(paused, completed("c1", "rain"))
    assert await harness.service.event(paused, completed("c1", "rain")) == first
    await harness.wait_until_idle(paused)
    assert repairs(harness) == [EARLY, "tool_result: tool rain"]
    for other in (completed("c1", "sun"), ToolEvent(ToolEventType.FAILED, "c1", "rain")):
        with pytest.raises(ResultConflict):
            await harness.service.event(paused, other)
    await harness.say(paused)
    late = await harness.service.event(paused, completed("c1", "rain"))
    assert (late.status, late.outstanding, late.late) == (CallStatus.COMPLETED, (), True)
    assert len(repairs(harness)) == 2


async def test_a_call_may_be_announced_and_report_partial_output(harness, paused: str) -> None:
    await harness.service.event(paused, ToolEvent(ToolEventType.STARTED, "c1"))
    for text in ("light ", "rain"):
        receipt = await harness.service.event(paused, ToolEvent(ToolEventType.DELTA, "c1", text))
    assert (receipt.status, receipt.outstanding) == (CallStatus.PENDING, ("c1",))
    stored = await harness.catalog.tool_calls.get(paused, "c1")
    assert (stored.started, stored.result) == (True, None)
    assert await harness.get_output(paused, "c1") == "light rain"
    await harness.wait_until_idle(paused)
    assert repairs(harness) == [EARLY]


async def test_a_delta_with_a_key_is_appended_once(harness, paused: str) -> None:
    key = IdempotencyKey("event", "k", "body")
    for _ in range(2):
        await harness.service.event(paused, ToolEvent(ToolEventType.DELTA, "c1", "rain "), key)
    assert await harness.get_output(paused, "c1") == "rain "


async def test_reports_of_what_is_unknown_or_too_long_are_refused(harness, paused: str) -> None:
    with pytest.raises(UnknownCall):
        await harness.service.event(paused, completed("c9", "rain"))
    with pytest.raises(UnknownSession):
        await harness.service.event("nobody", completed("c1", "rain"))
    with pytest.raises(LimitExceeded):
        await harness.service.event(paused, completed("c1", "x" * (1 << 21)))
    assert (await harness.catalog.tool_calls.get(paused, "c1")).result is None


async def test_a_result_that_comes_before_the_commit_of_its_call_waits_for_it(
    harness, call: Callable
) -> None:
    session = await harness.session()
    harness.worker.script = [[call("c1", "Bern")]]
    stream = harness.service.turn(session, TurnRequest((HELLO,)))
    while not isinstance(await anext(stream), ToolCallEmitted):
        pass
    receipt = await harness.service.event(session, completed("c1", "rain"))
    assert receipt.status is CallStatus.COMPLETED


async def test_a_deleted_session_takes_its_repair_with_it(harness, call: Callable) -> None:
    session = await harness.session()
    harness.worker.gates["repair"] = asyncio.Event()
    await pause(harness, session, call("c1", "Bern"))
    await harness.worker.reached["repair"].wait()
    await harness.service.delete(session)
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("background ")]
    assert session not in harness.worker.sessions
    with pytest.raises(UnknownSession):
        await harness.service.get(session)


async def test_a_stop_leaves_no_task_behind_and_the_repair_due(harness, call: Callable) -> None:
    session = await harness.session()
    harness.worker.gates["repair"] = asyncio.Event()
    await pause(harness, session, call("c1", "Bern"))
    await harness.worker.reached["repair"].wait()
    await harness.service.stop()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    harness.worker.gates.clear()
    await harness.start()
    await harness.say(session, Message("tool", "rain", tool_call_id="c1"), **WAITING)
    assert repairs(harness) == [EARLY, EARLY]
