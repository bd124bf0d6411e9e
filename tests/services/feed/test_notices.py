"""Notices have ids and numbers, no text, and survive the way to another gateway."""

import json
from dataclasses import fields
from typing import Any, get_args

import pytest

from kvrecall.domain.events import (
    EpisodesFailed,
    RepairFailed,
    ServiceEvent,
    SessionDeleted,
    TurnFailed,
    TurnFinished,
    TurnRetried,
    TurnStart,
    TurnTiming,
)
from kvrecall.domain.messages import Message, ToolCall
from kvrecall.domain.reports import MemoryReport, RepairReport, TurnOutcome
from kvrecall.domain.sessions.state_machine import SessionState
from kvrecall.domain.tool_calls import CallStatus
from services.feed.notices import Notice, to_notices

SECRET = "a secret text"
OUTCOME = TurnOutcome(
    "s",
    2,
    Message("assistant", SECRET, (ToolCall("c1", SECRET, SECRET),), reasoning=SECRET),
    "tool_calls",
    3,
    4,
    MemoryReport(length=7),
    (),
    {"prefill": 0.5, "decode": 0.25},
    stop_sequence=SECRET,
)
VALUES: dict[str, Any] = {
    "outcome": OUTCOME,
    "start": TurnStart(),
    "timing": TurnTiming(0.75, 0.0),
    "run": None,
    "report": RepairReport("tool_call", 1, 2, 3, 0.5, call_id="c1"),
    "memory": MemoryReport(promoted_rows=3),
    "message": SECRET,
    "calls": ("c1", "c2"),
    "status": CallStatus.COMPLETED,
    "state": SessionState.IDLE,
    "names": (SECRET,),
    "session": "s",
    "child": "t",
    "tenant": "ann",
}
NUMBERS = {"int": 5, "float": 0.5, "bool": True}


def build(kind: Any) -> Any:
    """Build an event of a kind, with secrets wherever text is."""
    values = {}
    for field in fields(kind):
        number = NUMBERS.get(getattr(field.type, "__name__", ""), "worker_lost")
        values[field.name] = VALUES.get(field.name, number)
    return kind(**values)


@pytest.mark.parametrize("kind", get_args(ServiceEvent), ids=lambda kind: kind.__name__)
def test_no_notice_has_text_and_each_survives_the_way(kind: Any) -> None:
    for notice in to_notices(build(kind), lambda _: "ann"):
        text = json.dumps(notice.to_json())
        assert SECRET not in text
        assert notice.to_json()["session"] in ("s", "t")
        assert Notice.decode(notice.encode()) == notice


def test_a_session_that_is_not_active_here_has_no_notices_but_of_its_deletion() -> None:
    assert (
        to_notices(TurnFinished(OUTCOME, TurnStart(), TurnTiming(0.75, 0.0)), lambda _: None) == []
    )
    (notice,) = to_notices(SessionDeleted("s", "ann"), lambda _: None)
    assert (notice.name, notice.tenant, notice.to_json()) == ("deleted", "ann", {"session": "s"})


def test_failures_have_their_code_and_not_their_message() -> None:
    found = [
        notice.to_json()
        for event in (
            TurnFailed("s", "worker_lost"),
            TurnRetried("s", "one", "worker_lost", SECRET),
            RepairFailed("s", "tool_call", "bad_settings", SECRET, True),
            EpisodesFailed("s", "match", "embedder_refused", SECRET),
        )
        for notice in to_notices(event, lambda _: "")
    ]
    assert [each["code"] for each in found] == [
        "worker_lost",
        "worker_lost",
        "bad_settings",
        "embedder_refused",
    ]


def test_a_turn_that_named_another_tenants_session_is_none_of_that_sessions() -> None:
    assert to_notices(TurnFailed("s", "unknown_session"), lambda _: "ann") == []


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '["a", "b", "c", []]', '["a", 1, "c", {}]', '["a", "b", "c"]', "\xff"]
)
def test_anything_else_is_no_notice(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a notice|Expecting value"):
        Notice.decode(text)
