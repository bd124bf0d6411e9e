"""What a turn may bring, decided before anything is changed."""

from typing import Any

import pytest

from kvrecall.domain.errors import (
    CallsOutstanding,
    DuplicateCall,
    EmptyTurn,
    InvalidRequest,
    LimitExceeded,
    ResultConflict,
    ServiceError,
    ToolResultWithoutCall,
    TurnTooLong,
)
from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.messages import Message, Sampling, ToolCall
from kvrecall.domain.reports import MemoryReport
from kvrecall.domain.sessions.session import Session
from kvrecall.domain.settings.session import PAUSE_TRIGGERS, RepairTrigger, SessionSettings
from kvrecall.domain.tool_calls import CallStatus, PendingCall
from kvrecall.domain.tool_events import timed_out
from kvrecall.domain.turn_request import TurnPlan, TurnRequest, plan_turn

LIMITS = ServiceLimits(
    max_turn_messages=6, max_turn_bytes=100, max_output_tokens=20, default_max_tokens=10
)
HELLO = Message("user", "hello")


def session(*calls: PendingCall, **settings: Any) -> Session:
    values: dict[str, Any] = {"budget": 64, "repair_rows": 8, "method": "snapkv", "seed": 7}
    chosen = SessionSettings(**(values | settings))
    return Session("s", 1, chosen, 0.0, 0.0, 3, MemoryReport(), calls)


def asked(position: int, result: str | None = None) -> PendingCall:
    status = CallStatus.PENDING if result is None else CallStatus.COMPLETED
    call = ToolCall(f"c{position}", "look", "{}")
    return PendingCall(3, position, call, status, result, batch=0 if result is None else 1)


def told(call: str, text: str = "r") -> Message:
    return Message("tool", text, tool_call_id=call)


def asks(*calls: str) -> Message:
    return Message("assistant", tool_calls=tuple(ToolCall(call, "look", "{}") for call in calls))


def plan(at: Session, *messages: Message, **options: Any) -> TurnPlan:
    return plan_turn(at, TurnRequest(messages, **options), LIMITS)


def test_a_plain_turn_passes_as_it_stands() -> None:
    planned = plan(session(), HELLO)
    assert planned.messages == (HELLO,)
    assert (planned.number, planned.repair, planned.asks) == (4, False, ())
    assert planned.sampling == Sampling(10, seed=11)


def test_results_come_first_and_in_call_order_whatever_order_they_were_sent_in() -> None:
    planned = plan(
        session(asked(0, "r0"), asked(1), asked(2)), told("c2", "r2"), told("c1", "r1"), HELLO
    )
    assert [message.content for message in planned.messages] == ["r0", "r1", "r2", "hello"]
    assert planned.inline_results == {"c2": "r2", "c1": "r1"}
    assert planned.messages[0] == Message("tool", "r0", tool_call_id="c0", name="look")


def test_a_result_that_an_event_brought_may_be_repeated_but_not_changed() -> None:
    assert plan(session(asked(0, "r0")), told("c0", "r0")).inline_results == {}
    with pytest.raises(ResultConflict, match="another result"):
        plan(session(asked(0, "r0")), told("c0", "other"))
    with pytest.raises(ResultConflict, match="timed out"):
        plan(session(timed_out(asked(0), 5)), told("c0"))


def test_results_that_wait_make_an_empty_turn_possible() -> None:
    assert [message.content for message in plan(session(asked(0, "r0"))).messages] == ["r0"]


def test_a_turn_repairs_on_its_path_when_it_asks_or_every_turn_does() -> None:
    every = {"repair_on": frozenset({RepairTrigger.TURN})}
    assert plan(session(**every), HELLO).repair
    assert not plan(session(**every), HELLO, repair=False).repair
    assert not plan(session(**every, repair_rows=0), HELLO).repair
    assert not plan(session(asked(0)), told("c0")).repair
    assert plan(session(asked(0)), told("c0"), repair=True).repair


def test_a_turn_that_only_goes_on_after_a_pause_is_not_repaired_again() -> None:
    both = {"repair_on": PAUSE_TRIGGERS | {RepairTrigger.TURN}}
    assert not plan(session(asked(0, "r0"), **both)).repair
    assert not plan(session(asked(0, "r0"), **both), told("c0", "r0")).repair
    assert plan(session(asked(0, "r0"), **both), repair=True).repair
    assert plan(session(asked(0, "r0"), **both), HELLO).repair
    assert plan(session(asked(0), **both), told("c0")).repair
    before_turns = {"repair_on": frozenset({RepairTrigger.TURN})}
    assert plan(session(asked(0, "r0"), **before_turns)).repair


@pytest.mark.parametrize(
    ("request_", "repair", "deferred"),
    [
        ({"generate": True}, True, False),
        ({"generate": False}, False, True),
        ({"generate": False, "keep_distribution": True}, True, False),
        ({"generate": False, "compare_with": "other"}, True, False),
        ({"generate": False, "repair": True}, True, False),
        ({"generate": False, "repair": False}, False, False),
    ],
)
def test_a_repair_waits_for_a_turn_in_which_something_is_predicted(
    request_: dict[str, Any], repair: bool, deferred: bool
) -> None:
    planned = plan(session(repair_on=frozenset({RepairTrigger.TURN})), HELLO, **request_)
    assert (planned.repair, planned.defer_repair) == (repair, deferred)
    never = plan(session(), HELLO, **{**request_, "repair": None})
    assert (never.repair, never.defer_repair) == (False, False)


def test_a_turn_cannot_ask_for_repair_where_no_rows_are_kept_for_it() -> None:
    with pytest.raises(InvalidRequest, match="repair_rows") as caught:
        plan(session(repair_rows=0), HELLO, repair=True)
    assert caught.value.details["field"] == "repair"


def test_recorded_calls_at_the_end_of_a_turn_are_what_it_pauses_on() -> None:
    planned = plan(session(), HELLO, asks("a", "b"), generate=False)
    assert [call.id for call in planned.asks] == ["a", "b"]


def test_recorded_calls_with_their_results_pause_on_nothing() -> None:
    assert (
        plan(
            session(), HELLO, asks("a", "b"), told("b"), told("a"), Message("assistant", "so")
        ).asks
        == ()
    )


@pytest.mark.parametrize(
    ("at", "messages", "options", "error"),
    [
        (session(), (), {}, EmptyTurn),
        (session(), (told("c0"),), {}, ToolResultWithoutCall),
        (session(asked(0)), (told("c0"), told("c0")), {}, ToolResultWithoutCall),
        (session(asked(0)), (told("other"),), {}, ToolResultWithoutCall),
        (session(), (HELLO, told("c0")), {}, ToolResultWithoutCall),
        (session(), (asks("a"), told("a"), told("a")), {}, ToolResultWithoutCall),
        (session(asked(0)), (HELLO,), {}, CallsOutstanding),
        (session(asked(0), asked(1)), (told("c0"), HELLO), {}, CallsOutstanding),
        (session(asked(0)), (), {}, CallsOutstanding),
        (session(), (asks("a"),), {"generate": True}, CallsOutstanding),
        (session(), (asks("a"), HELLO), {"generate": False}, CallsOutstanding),
        (session(), (asks("a", "b"), told("a")), {"generate": False}, CallsOutstanding),
        (session(), (asks("a", "a"),), {"generate": False}, DuplicateCall),
        (session(), (Message("robot", "x"),), {}, InvalidRequest),
        (session(), (Message("tool", "x"),), {}, InvalidRequest),
        (session(), (Message("user", "x", tool_call_id="c0"),), {}, InvalidRequest),
        (
            session(),
            (Message("user", tool_calls=(ToolCall("a", "look", "{}"),)),),
            {},
            InvalidRequest,
        ),
        (
            session(),
            (Message("assistant", tool_calls=(ToolCall("a", "look", "[]"),)),),
            {},
            InvalidRequest,
        ),
        (
            session(),
            (Message("assistant", tool_calls=(ToolCall("a", "look", "{"),)),),
            {},
            InvalidRequest,
        ),
        (
            session(),
            (Message("assistant", tool_calls=(ToolCall("", "look", "{}"),)),),
            {},
            InvalidRequest,
        ),
        (session(), (HELLO,) * 7, {}, TurnTooLong),
        (session(), (Message("user", "é" * 51),), {}, TurnTooLong),
        (session(), (HELLO,), {"sampling": Sampling(21)}, LimitExceeded),
        (session(), (HELLO,), {"sampling": Sampling(0)}, LimitExceeded),
    ],
)
def test_what_does_not_fit_is_refused(
    at: Session, messages: tuple[Message, ...], options: dict, error: type[ServiceError]
) -> None:
    with pytest.raises(error) as caught:
        plan(at, *messages, **options)
    assert type(caught.value) is error


def test_a_refusal_names_the_calls_the_field_and_the_limit() -> None:
    with pytest.raises(CallsOutstanding) as outstanding:
        plan(session(asked(0), asked(1, "r"), asked(2)), HELLO)
    assert outstanding.value.details == {"calls": ["c0", "c2"]}
    with pytest.raises(TurnTooLong) as too_long:
        plan(session(), *[HELLO] * 7)
    assert too_long.value.details == {"field": "messages", "limit": 6}
    with pytest.raises(ToolResultWithoutCall) as without:
        plan(session(), HELLO, told("c9"))
    assert without.value.details == {"field": "messages[1].tool_call_id", "call": "c9"}
