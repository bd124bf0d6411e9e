"""The split of a recorded conversation into turns and pauses."""

from typing import Any

from kvrecall_server.replay.recording import PauseStep, Recording, TurnStep, split_exchanges

SYSTEM = {"role": "system", "content": "Rules."}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, *calls: str) -> dict[str, Any]:
    made = [
        {"id": call, "type": "function", "function": {"name": "find", "arguments": "{}"}}
        for call in calls
    ]
    return {"role": "assistant", "content": text, **({"tool_calls": made} if made else {})}


def result(call: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call, "content": text}


def test_a_turn_ends_with_the_reply_and_an_exchange_before_the_next_user_message() -> None:
    messages = (SYSTEM, user("a"), assistant("b"), user("c"), user("d"), assistant("e"))
    first, second = split_exchanges(Recording("x", messages))
    assert first.steps == (TurnStep((SYSTEM, user("a"), assistant("b"))),)
    assert second.steps == (TurnStep((user("c"), user("d"), assistant("e"))),)


def test_tool_results_are_a_pause_between_two_turns() -> None:
    calling = assistant("", "c1", "c2")
    messages = (user("a"), calling, result("c2", "two"), result("c1", "one"), assistant("b"))
    (exchange,) = split_exchanges(Recording("x", messages))
    assert exchange.steps == (
        TurnStep((user("a"), calling)),
        PauseStep((("c1", "one"), ("c2", "two"))),
        TurnStep((assistant("b"),)),
    )


def test_a_call_without_a_recorded_result_has_none() -> None:
    (exchange, _) = split_exchanges(Recording("x", (user("a"), assistant("", "c1"), user("b"))))
    assert exchange.steps[1] == PauseStep((("c1", None),))


def test_calls_with_the_same_id_get_their_results_in_order() -> None:
    messages = (
        user("a"),
        assistant("", "c"),
        result("c", "1"),
        assistant("", "c"),
        result("c", "2"),
    )
    (exchange,) = split_exchanges(Recording("x", messages))
    assert [step for step in exchange.steps if isinstance(step, PauseStep)] == [
        PauseStep((("c", "1"),)),
        PauseStep((("c", "2"),)),
    ]


def test_a_user_message_without_a_reply_is_a_turn_without_a_reply() -> None:
    (exchange,) = split_exchanges(Recording("x", (user("a"),)))
    (step,) = exchange.steps
    assert isinstance(step, TurnStep)
    assert not step.has_reply
