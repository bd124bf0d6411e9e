"""The state machine and what follows from a committed session."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.errors import IllegalTransition
from services.messages import ToolCall
from services.reports import MemoryReport
from services.sessions import (
    TRANSITIONS,
    CallStatus,
    PendingCall,
    RepairTrigger,
    Session,
    SessionEvent,
    SessionSettings,
    SessionState,
    due_repairs,
    next_state,
)

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
def test_a_repair_starts_only_in_a_pause_and_a_pause_only_after_calls(events: list[SessionEvent]) -> None:
    state, history = SessionState.IDLE, []
    for event in events:
        if (state, event) not in TRANSITIONS:
            continue
        if event is SessionEvent.REPAIR_STARTED:
            assert state is SessionState.PAUSED
        state = next_state(state, event)
        history.append(event)
        if state is SessionState.PAUSED:
            assert {SessionEvent.CALLS_MADE, SessionEvent.ROLLED_BACK_TO_PAUSE} & set(history)


@pytest.mark.parametrize("state", SessionState)
@pytest.mark.parametrize("event", ROLLBACKS)
def test_any_state_can_be_rolled_back_to_rest(state: SessionState, event: SessionEvent) -> None:
    assert next_state(state, event) is ROLLBACKS[event]


def test_no_second_turn_starts_within_a_turn() -> None:
    for state in (SessionState.PREFILLING, SessionState.DECODING, SessionState.REPAIRING):
        with pytest.raises(IllegalTransition, match=state):
            next_state(state, SessionEvent.TURN_STARTED)


def paused(*calls: PendingCall, **settings: object) -> Session:
    chosen = SessionSettings(**{"budget": 64, "repair_rows": 8, "method": "snapkv"} | settings)
    return Session("s", 1, chosen, 0.0, 0.0, 1, MemoryReport(), calls)


def asked(position: int, batch: int = 0, **fields: object) -> PendingCall:
    call = PendingCall(1, position, ToolCall(f"c{position}", "look", f'{{"n": {position}}}'), batch=batch)
    if batch:
        call = replace(call, status=CallStatus.COMPLETED, result=f"r{position}")
    return replace(call, **fields)


def test_each_call_is_repaired_on_in_call_order_before_any_result() -> None:
    due = due_repairs(paused(asked(0), asked(1, batch=1)))
    assert [repair.trigger for repair in due] == [RepairTrigger.TOOL_CALL] * 2 + [RepairTrigger.TOOL_RESULT]
    assert [repair.text for repair in due[:2]] == ['look {"n": 0}', 'look {"n": 1}']


def test_each_arrival_is_repaired_on_with_all_results_so_far_in_call_order() -> None:
    calls = [asked(position, batch, call_repaired=True) for position, batch in enumerate((2, 1, 3))]
    due = due_repairs(paused(*calls))
    assert [[message.content for message in repair.messages] for repair in due] == [
        ["r1"],
        ["r0", "r1"],
        ["r0", "r1", "r2"],
    ]


def test_what_is_done_is_not_due_again() -> None:
    assert due_repairs(paused(asked(0, batch=1, call_repaired=True, result_repaired=True))) == []


@pytest.mark.parametrize(
    ("settings", "triggers"),
    [
        ({"repair_rows": 0}, []),
        ({"repair_on": frozenset()}, []),
        ({"repair_on": frozenset({RepairTrigger.TOOL_RESULT})}, [RepairTrigger.TOOL_RESULT]),
        ({"repair_on": frozenset({RepairTrigger.TOOL_CALL})}, [RepairTrigger.TOOL_CALL]),
    ],
)
def test_only_what_the_session_asked_for_is_due(settings: dict, triggers: list[RepairTrigger]) -> None:
    assert [repair.trigger for repair in due_repairs(paused(asked(0, batch=1), **settings))] == triggers
