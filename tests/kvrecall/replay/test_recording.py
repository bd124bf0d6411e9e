"""How a recorded conversation is cut into turns and pauses."""

from typing import Any

from kvrecall.replay.recording import Recording, Results, Say, exchanges_of

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


def test_a_turn_ends_with_the_assistants_words_and_an_exchange_with_the_next_users() -> None:
    messages = (SYSTEM, user("a"), assistant("b"), user("c"), user("d"), assistant("e"))
    first, second = exchanges_of(Recording("x", messages))
    assert first.steps == (Say((SYSTEM, user("a"), assistant("b"))),)
    assert second.steps == (Say((user("c"), user("d"), assistant("e"))),)


def test_tool_results_are_a_pause_between_two_turns() -> None:
    calling = assistant("", "c1", "c2")
    messages = (user("a"), calling, result("c2", "two"), result("c1", "one"), assistant("b"))
    (exchange,) = exchanges_of(Recording("x", messages))
    assert exchange.steps == (
        Say((user("a"), calling)),
        Results((("c1", "one"), ("c2", "two"))),
        Say((assistant("b"),)),
    )


def test_a_call_without_a_recorded_result_is_known_as_such() -> None:
    (exchange, _) = exchanges_of(Recording("x", (user("a"), assistant("", "c1"), user("b"))))
    assert exchange.steps[1] == Results((("c1", None),))


def test_an_id_that_comes_back_gets_its_results_in_order() -> None:
    messages = (
        user("a"),
        assistant("", "c"),
        result("c", "1"),
        assistant("", "c"),
        result("c", "2"),
    )
    (exchange,) = exchanges_of(Recording("x", messages))
    assert [step for step in exchange.steps if isinstance(step, Results)] == [
        Results((("c", "1"),)),
        Results((("c", "2"),)),
    ]


def test_words_of_a_user_that_nobody_answered_are_a_turn_without_a_reply() -> None:
    (exchange,) = exchanges_of(Recording("x", (user("a"),)))
    (step,) = exchange.steps
    assert isinstance(step, Say)
    assert not step.has_reply
