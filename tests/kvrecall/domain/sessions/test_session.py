"""The state machine and what follows from a committed session."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrecall.domain.errors import IllegalTransition
from kvrecall.domain.messages import ToolCall
from kvrecall.domain.repairs import due_repairs
from kvrecall.domain.reports import MemoryReport
from kvrecall.domain.sessions.session import Session
from kvrecall.domain.sessions.state_machine import (
    TRANSITIONS,
    SessionEvent,
    SessionState,
    next_state,
)
from kvrecall.domain.settings.session import RepairTrigger, SessionSettings
from kvrecall.domain.tool_calls import CallStatus, PendingCall

ROLLBACKS = {
    SessionEvent.ROLLED_BACK_TO_IDLE: SessionState.IDLE,
    SessionEvent.ROLLED_BACK_TO_PAUSE: SessionState.PAUSED,
}


@given(st.lists(st.sampled_from(SessionEvent), max_size=40))
def test_no_sequence_of_events_leads_out_of_the_table(events: list[SessionEvent]) -> None:
    state = SessionState.IDLE
    for event in events:
        if (state, event) in TRANSITIONS:
            state = next_state(state, event)
        else:
            with pytest.raises(IllegalTransition):
                next_state(state, event)
        assert state in SessionState


@given(st.lists(st.sampled_from(SessionEvent), max_size=40))
def test_a_repair_starts_only_at_rest_and_a_pause_only_after_calls(
    events: list[SessionEvent],
) -> None:
    state = SessionState.IDLE
    history = []
    for event in events:
        if (state, event) not in TRANSITIONS:
            continue
        if event is SessionEvent.REPAIR_STARTED:
            assert state in (SessionState.IDLE, SessionState.PAUSED)
        state = next_state(state, event)
        history.append(event)
        if state is SessionState.PAUSED:
            began = {
                SessionEvent.CALLS_EMITTED,
                SessionEvent.ROLLED_BACK_TO_PAUSE,
                SessionEvent.REPAIR_ENDED_IN_PAUSE,
            }
            assert began & set(history)


def test_a_repair_ends_where_it_began() -> None:
    ends = {SessionEvent.REPAIR_ENDED_IN_IDLE, SessionEvent.REPAIR_ENDED_IN_PAUSE}
    for state in (SessionState.IDLE, SessionState.PAUSED):
        repairing = next_state(state, SessionEvent.REPAIR_STARTED)
        assert state in {next_state(repairing, end) for end in ends}
        for event in set(SessionEvent) - ends - set(ROLLBACKS):
            with pytest.raises(IllegalTransition):
                next_state(repairing, event)


@pytest.mark.parametrize("state", SessionState)
@pytest.mark.parametrize("event", ROLLBACKS)
def test_any_state_can_be_rolled_back_to_rest(state: SessionState, event: SessionEvent) -> None:
    assert next_state(state, event) is ROLLBACKS[event]


def test_no_second_turn_starts_within_a_turn() -> None:
    for state in (SessionState.PREFILLING, SessionState.DECODING, SessionState.REPAIRING):
        with pytest.raises(IllegalTransition, match=state):
            next_state(state, SessionEvent.TURN_STARTED)


def paused(*calls: PendingCall, output_due: int = 0, **settings: Any) -> Session:
    values: dict[str, Any] = {"budget": 64, "repair_rows": 8, "method": "snapkv", **settings}
    chosen = SessionSettings(**values)
    return Session("s", 1, chosen, 0.0, 0.0, 1, MemoryReport(), calls, output_due=output_due)


def asked(position: int, batch: int = 0, repaired: bool = False, **fields: Any) -> PendingCall:
    call = PendingCall(
        1, position, ToolCall(f"c{position}", "look", f'{{"n": {position}}}'), batch=batch
    )
    if batch:
        call = replace(call, status=CallStatus.COMPLETED, result=f"r{position}")
    return replace(call, call_signal=call.call.signal if repaired else "", **fields)


def test_each_call_is_repaired_on_in_call_order_before_any_result() -> None:
    due = due_repairs(paused(asked(0), asked(1, batch=1)))
    assert [repair.trigger for repair in due] == [RepairTrigger.TOOL_CALL] * 2 + [
        RepairTrigger.TOOL_RESULT
    ]
    assert [repair.text for repair in due[:2]] == ['look {"n": 0}', 'look {"n": 1}']


def test_each_arrival_is_repaired_on_with_all_results_so_far_in_call_order() -> None:
    calls = [asked(position, batch, repaired=True) for position, batch in enumerate((2, 1, 3))]
    due = due_repairs(paused(*calls))
    assert [[message.content for message in repair.messages] for repair in due] == [
        ["r1"],
        ["r0", "r1"],
        ["r0", "r1", "r2"],
    ]


def test_what_is_done_is_not_due_again() -> None:
    assert due_repairs(paused(asked(0, batch=1, repaired=True, result_repaired=True))) == []


def test_a_call_is_repaired_on_again_with_the_arguments_that_the_client_really_runs() -> None:
    (due,) = due_repairs(paused(asked(0, repaired=True, arguments='{"n": 7}')))
    assert (due.trigger, due.text) == (RepairTrigger.TOOL_CALL, 'look {"n": 7}')


def test_output_is_repaired_on_as_far_as_it_is_due_and_not_once_the_result_is_there() -> None:
    grown: dict[str, Any] = {"delta_due": 6, "repaired": True}
    (due,) = due_repairs(paused(asked(0, **grown)))
    assert (due.trigger, due.position, due.reach) == (RepairTrigger.TOOL_DELTA, 0, 6)
    assert due_repairs(paused(asked(0, delta_repaired=6, **grown))) == []
    with_result = due_repairs(paused(asked(0, batch=1, **grown)))
    assert [repair.trigger for repair in with_result] == [RepairTrigger.TOOL_RESULT]


def test_the_last_answer_is_repaired_on_when_no_tool_is_waited_for() -> None:
    own = {"repair_on": frozenset({RepairTrigger.LAST_OUTPUT})}
    (due,) = due_repairs(paused(output_due=5, **own))
    assert (due.trigger, due.output) == (RepairTrigger.LAST_OUTPUT, 5)
    assert due_repairs(paused(asked(0), output_due=5, **own)) == []
    assert due_repairs(paused(output_due=5)) == []


@pytest.mark.parametrize(
    ("settings", "triggers"),
    [
        ({"repair_rows": 0}, []),
        ({"repair_on": frozenset()}, []),
        ({"repair_on": frozenset({RepairTrigger.TOOL_RESULT})}, [RepairTrigger.TOOL_RESULT]),
        ({"repair_on": frozenset({RepairTrigger.TOOL_CALL})}, [RepairTrigger.TOOL_CALL]),
    ],
)
def test_only_what_the_session_asked_for_is_due(
    settings: dict, triggers: list[RepairTrigger]
) -> None:
    assert [
        repair.trigger for repair in due_repairs(paused(asked(0, batch=1), **settings))
    ] == triggers
