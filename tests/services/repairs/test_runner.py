"""Repairs between turns: order, triggers and turns that do not wait for them."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import asdict

import pytest

from kvrecall.domain.errors import (
    CallsOutstanding,
    ServiceError,
    UnknownSession,
    WorkerLost,
)
from kvrecall.domain.events import RepairFinished, ServiceEvent
from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.messages import Message, ToolCall
from kvrecall.domain.repairs import due_repairs
from kvrecall.domain.sessions.state_machine import SessionState
from kvrecall.domain.settings.repair import RepairRule
from kvrecall.domain.settings.session import RepairTrigger
from kvrecall.domain.tool_calls import CallStatus
from kvrecall.domain.tool_events import ToolEvent, ToolEventType
from kvrecall.protocol.v1 import worker_pb2 as pb

HELLO = Message("user", "hello")
WAITING = {"wait_for_repairs": True}
EARLY = 'tool_call: weather {"city": "Bern"}'


async def test_a_call_starts_a_repair_by_itself(harness, paused: str) -> None:
    await harness.wait_until_idle(paused)
    assert harness.repairs == [EARLY]
    session, state = await harness.service.get(paused)
    assert state is SessionState.PAUSED
    assert session.calls[0].call_signal == 'weather {"city": "Bern"}'
    assert session.memory.promoted_rows == 2


async def test_the_turn_is_acknowledged_before_the_repair_ends(harness, call: Callable) -> None:
    session = await harness.session()
    harness.worker.gates["repair"] = asyncio.Event()
    await harness.pause(session, call("c1", "Bern"))
    await harness.worker.reached["repair"].wait()
    assert (await harness.service.get(session))[1] is SessionState.REPAIRING
    harness.worker.gates["repair"].set()
    await harness.wait_until_idle(session)
    assert (await harness.service.get(session))[1] is SessionState.PAUSED


async def test_a_result_starts_a_second_repair_after_the_early_one(harness, call: Callable) -> None:
    session = await harness.session()
    harness.worker.gates["repair"] = asyncio.Event()
    await harness.pause(session, call("c1", "Bern"))
    await harness.worker.reached["repair"].wait()
    receipt = await harness.complete_call(session, "c1", "rain")
    assert (receipt.status, receipt.outstanding) == (CallStatus.COMPLETED, ())
    assert harness.repairs == [EARLY]
    harness.worker.gates["repair"].set()
    await harness.wait_until_idle(session)
    assert harness.repairs == [EARLY, "tool_result: tool rain"]


async def test_a_turn_that_asks_to_waits_for_the_repairs_and_reports_them(
    harness, call: Callable
) -> None:
    session = await harness.session()
    harness.worker.gates["repair"] = asyncio.Event()
    await harness.pause(session, call("c1", "Bern"))
    await harness.complete_call(session, "c1", "rain")
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
    await harness.pause(session, call("c1", "Bern"))
    await harness.worker.reached["repair"].wait()
    await harness.complete_call(session, "c1", "rain")
    outcome = await harness.say(session)
    (cut,) = outcome.repairs
    assert (cut.trigger, cut.truncated, cut.share_scanned, cut.in_pause) == (
        "tool_call",
        True,
        0.5,
        False,
    )
    assert outcome.repairs_skipped == 1
    assert harness.repairs == [EARLY]
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
        await harness.complete_call(paused, "c1", "rain")
        outcome = await harness.say(paused)
        assert harness.repairs == [EARLY]
        assert [repair.trigger for repair in outcome.repairs] == ["tool_call"]
        assert outcome.repairs_skipped == 1


async def test_a_repair_that_was_not_begun_is_not_begun_for_a_turn(harness, call: Callable) -> None:
    session = await harness.session()
    harness.worker.faults["repair"] = WorkerLost("gone")
    await harness.pause(session, call("c1", "Bern"))
    await harness.wait_until_idle(session)
    outcome = await harness.say(session, Message("tool", "rain", tool_call_id="c1"))
    assert (outcome.repairs, outcome.repairs_skipped) == ((), 1)
    assert harness.repairs == []


@pytest.mark.parametrize("how", ["cancelled", "failed"])
async def test_after_a_turn_that_came_to_nothing_what_is_due_goes_on(
    harness, call: Callable, how: str
) -> None:
    session = await harness.session()
    harness.worker.gates["repair"] = asyncio.Event()
    await harness.pause(session, call("c1", "Bern"))
    await harness.worker.reached["repair"].wait()
    await harness.complete_call(session, "c1", "rain")
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
    assert harness.repairs == [EARLY, "tool_result: tool rain"]
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
    await harness.pause(session, call("c1", "Bern"))
    await harness.worker.reached["repair"].wait()
    await harness.complete_call(session, "c1", "rain")
    turn = asyncio.create_task(harness.say(session))
    await hurried.wait()
    (running,) = harness.service._running
    running.cancel()
    with pytest.raises(ServiceError):
        await turn
    harness.worker.gates["repair"].set()
    await harness.wait_until_idle(session)
    assert harness.repairs == [EARLY, "tool_result: tool rain"]


async def test_a_worker_that_cannot_be_hurried_does_not_fail_the_turn(
    harness, call: Callable
) -> None:
    session = await harness.session()
    harness.worker.gates["repair"] = asyncio.Event()
    harness.worker.faults["stop_early"] = WorkerLost("gone")
    await harness.pause(session, call("c1", "Bern"))
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
    await harness.pause(paused, pb.ToolCall(id="c2", name="weather", arguments="{}"))
    await harness.wait_until_idle(paused)
    outcome = await harness.say(paused, Message("tool", "sun", tool_call_id="c2"), repair=True)
    assert [repair.trigger for repair in outcome.repairs] == ["tool_call", "turn"]


async def test_a_session_s_deadline_holds_for_each_of_its_repairs(harness, call: Callable) -> None:
    session = await harness.session(repair_seconds=0.25)
    await harness.pause(session, call("c1", "Bern"))
    await harness.wait_until_idle(session)
    await harness.say(session, Message("tool", "rain", tool_call_id="c1"), repair=True)
    assert [each.repair_seconds for each in harness.worker.options] == [0.25, 0.25]


async def test_how_a_session_repairs_is_told_to_the_worker(harness) -> None:
    session = await harness.session(repair_settings=RepairRule(contrast=1.0))
    spec = harness.worker.specs[session]
    assert json.loads(spec.repair_settings) == asdict(RepairRule(contrast=1.0))
    other = harness.worker.specs[await harness.session()]
    assert other.repair_settings == ""


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
    assert harness.repairs == ["last_output: the key hangs there"]
    assert (await harness.service.get(session))[1] is SessionState.IDLE
    outcome = await harness.say(session, HELLO)
    assert [repair.trigger for repair in outcome.repairs] == ["last_output"]
    await harness.wait_until_idle(session)
    assert harness.repairs[1:] == ["last_output: yes"]


async def test_nothing_was_said_so_nothing_is_a_signal(harness, call: Callable) -> None:
    session = await harness.session(repair_on=frozenset({RepairTrigger.LAST_OUTPUT}))
    await harness.say(session, HELLO, generate=False)
    await harness.pause(session, call("c1", "Bern"))
    await harness.wait_until_idle(session)
    assert harness.repairs == []


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
    await harness.pause(session, call("c1", "Bern"), call("c2", "Rome"))
    await harness.complete_call(session, "c2", "sun")
    await harness.service.event(session, ToolEvent(ToolEventType.FAILED, "c1", "no such city"))
    await harness.wait_until_idle(session)
    assert harness.repairs == [
        EARLY,
        'tool_call: weather {"city": "Rome"}',
        "tool_result: tool sun",
        "tool_result: tool no such city tool sun",
    ]


async def test_recorded_calls_pause_as_if_the_model_had_asked(harness) -> None:
    session = await harness.session()
    recorded = Message("assistant", tool_calls=(ToolCall("c1", "weather", '{"city": "Bern"}'),))
    outcome = await harness.say(session, HELLO, recorded, generate=False)
    await harness.wait_until_idle(session)
    assert outcome.finish_reason == "appended"
    assert harness.repairs == [EARLY]
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
    await harness.pause(session, call("c1", "Bern"))
    await harness.complete_call(session, "c1", "rain")
    outcome = await harness.say(session, **WAITING)
    assert harness.repairs == expected
    assert len(outcome.repairs) == len(expected)


async def test_reports_are_told_to_observers(harness, call: Callable) -> None:
    heard: list[ServiceEvent] = []
    harness.service.observe(heard.append)
    session = await harness.session()
    await harness.pause(session, call("c1", "Bern"))
    await harness.wait_until_idle(session)
    (finished,) = [observation for observation in heard if isinstance(observation, RepairFinished)]
    assert (finished.session, finished.report.trigger, finished.report.promoted) == (
        session,
        "tool_call",
        2,
    )


async def test_a_deleted_session_takes_its_repair_with_it(harness, call: Callable) -> None:
    session = await harness.session()
    harness.worker.gates["repair"] = asyncio.Event()
    await harness.pause(session, call("c1", "Bern"))
    await harness.worker.reached["repair"].wait()
    await harness.service.delete(session)
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("background ")]
    assert session not in harness.worker.sessions
    with pytest.raises(UnknownSession):
        await harness.service.get(session)


async def test_a_stop_leaves_no_task_behind_and_the_repair_due(harness, call: Callable) -> None:
    session = await harness.session()
    harness.worker.gates["repair"] = asyncio.Event()
    await harness.pause(session, call("c1", "Bern"))
    await harness.worker.reached["repair"].wait()
    await harness.service.stop()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    harness.worker.gates.clear()
    await harness.start()
    await harness.say(session, Message("tool", "rain", tool_call_id="c1"), **WAITING)
    assert harness.repairs == [EARLY, EARLY]


async def test_a_turn_with_calls_outstanding_is_refused_and_names_them(
    harness, call: Callable
) -> None:
    session = await harness.session()
    await harness.pause(session, call("c1", "Bern"), call("c2", "Rome"))
    await harness.complete_call(session, "c1", "rain")
    with pytest.raises(CallsOutstanding) as caught:
        await harness.say(session, HELLO)
    assert caught.value.details["calls"] == ["c2"]
