"""Stored JSON of kvrecall 0.1.0 takes the standard terms, and nothing of a user's is changed."""

import json

from kvrecall.domain.reports import RepairReport, TurnOutcome
from kvrecall.domain.session import Session
from kvrecall.domain.tool_calls import PendingCall
from services.catalog import renames
from services.catalog.redis.mapping import CALL
from services.catalog.serialization import OUTCOME, REPAIR

REPAIR_0_1_0 = {
    "trigger": "tool_result",
    "signal_tokens": 3,
    "scored_rows": 7,
    "promoted": 2,
    "seconds": 0.5,
    "cut": True,
}
MEMORY = {"length": 7, "budget": 64}
OUTCOME_0_1_0 = {
    "session": "s",
    "turn": 1,
    "message": {"role": "assistant", "content": '{"cut": 1, "said": 2}'},
    "finish_reason": "remembered",
    "prompt_tokens": 3,
    "output_tokens": 0,
    "memory": MEMORY,
    "repairs": [REPAIR_0_1_0],
    "seconds": {"decode": 0.5},
    "own_repair": REPAIR_0_1_0,
    "repairs_left_out": 2,
}
CALL_0_1_0 = {
    "turn": 1,
    "position": 0,
    "call": {"id": "a", "name": "look", "arguments": '{"said": 1}'},
    "heard_at": 12.5,
    "said": 2,
}
SESSION_0_1_0 = {
    "id": "s",
    "settings": {"metadata": {"said": "hello", "cut": "short", "heard_at": "noon"}},
    "calls": [CALL_0_1_0],
    "repairs": [REPAIR_0_1_0],
}


def test_an_outcome_keeps_its_values_under_the_new_names() -> None:
    outcome: TurnOutcome = OUTCOME.validate_python(renames.rename_in_outcome(OUTCOME_0_1_0))
    assert (outcome.finish_reason, outcome.repairs_skipped) == ("appended", 2)
    assert outcome.own_repair is not None
    assert outcome.own_repair.truncated
    assert [repair.truncated for repair in outcome.repairs] == [True]
    assert outcome.message is not None
    assert outcome.message.content == '{"cut": 1, "said": 2}'


def test_other_finish_reasons_and_a_missing_repair_stay_as_they_are() -> None:
    renamed = renames.rename_in_outcome(
        {**OUTCOME_0_1_0, "finish_reason": "stop", "own_repair": None}
    )
    assert (renamed["finish_reason"], renamed["own_repair"]) == ("stop", None)


def test_a_call_and_a_repair_keep_their_values_under_the_new_names() -> None:
    call: PendingCall = CALL.validate_python(renames.rename_in_call(CALL_0_1_0))
    assert (call.last_event_at, call.consumed_in_turn) == (12.5, 2)
    assert call.call.arguments == '{"said": 1}'
    repair: RepairReport = REPAIR.validate_python(renames.rename_in_repair(REPAIR_0_1_0))
    assert repair.truncated
    record = renames.rename_in_repair_record({"number": 1, "report": REPAIR_0_1_0})
    assert record["report"]["truncated"] is True


def test_a_session_is_renamed_but_not_its_metadata() -> None:
    renamed = renames.rename_in_session(SESSION_0_1_0)
    assert renamed["settings"] == SESSION_0_1_0["settings"]
    assert renamed["calls"][0]["last_event_at"] == 12.5
    assert renamed["repairs"][0]["truncated"] is True


def test_a_response_is_renamed_by_what_it_is() -> None:
    assert renames.rename_in_response(OUTCOME_0_1_0) == renames.rename_in_outcome(OUTCOME_0_1_0)
    assert renames.rename_in_response(SESSION_0_1_0) == renames.rename_in_session(SESSION_0_1_0)
    receipt = {"session": "s", "call_id": "a", "type": "tool_call.started", "said": "kept"}
    assert [renames.rename_in_response(other) for other in ({}, receipt)] == [{}, receipt]


def test_renaming_twice_changes_nothing_more() -> None:
    for change, value in (
        (renames.rename_in_outcome, OUTCOME_0_1_0),
        (renames.rename_in_turn, {"number": 1, "outcome": OUTCOME_0_1_0}),
        (renames.rename_in_call, CALL_0_1_0),
        (renames.rename_in_session, SESSION_0_1_0),
        (renames.rename_in_response, OUTCOME_0_1_0),
    ):
        once = change(value)
        assert once != value
        assert change(once) == once


def test_no_stored_type_has_an_old_name() -> None:
    old = {"cut", "repairs_left_out", "heard_at", "said", "remembered"}
    for stored in (RepairReport, TurnOutcome, PendingCall, Session):
        assert not old & set(stored.__dataclass_fields__)
    assert not old & set(json.loads(json.dumps(renames.rename_in_outcome(OUTCOME_0_1_0))))


def test_a_value_of_another_form_is_left_for_the_reader_to_refuse() -> None:
    for value in (None, 3, "text", [1], {"repairs": 4, "calls": "x", "own_repair": []}):
        assert renames.rename_in_session(value) == value
        assert renames.rename_in_outcome(value) == value
        assert renames.rename_in_response(value) == value
