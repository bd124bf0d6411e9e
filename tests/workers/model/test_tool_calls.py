"""Tool calls are parsed from an answer's text; malformed ones stay in it."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.model.tool_calls import parse_tool_calls


def test_calls_are_removed_from_the_text() -> None:
    text = (
        'Let me see. <tool_call>\n{"name": "a", "arguments": {"x": {"y": [1, "}"]}}}\n</tool_call>'
    )
    text += " and"
    text += '<tool_call>{"name": "b"}</tool_call>'
    left, calls = parse_tool_calls(text)
    assert left == "Let me see.  and"
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [
        ("a", {"x": {"y": [1, "}"]}}),
        ("b", {}),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "no call at all",
        '<tool_call>{"name": "a", "arguments": {}',
        '<tool_call>{"name": "a", "arguments": {}}',
        "<tool_call>{name: a}</tool_call>",
        "<tool_call>[]</tool_call>",
        "<tool_call></tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": 3}</tool_call>',
        '<tool_call>{"name": "a", "arguments": "x"}</tool_call>',
        '<tool_call>{"name": "a"} and more</tool_call>',
        "</tool_call>",
        "<tool_call>" + "[" * 100_000,
    ],
)
def test_malformed_calls_stay_in_the_text(text: str) -> None:
    assert parse_tool_calls(text) == (text, [])


def test_a_bad_call_does_not_hide_a_good_one() -> None:
    left, calls = parse_tool_calls(
        '<tool_call>{"bad <tool_call>{"name": "a", "arguments": {"t": "</tool_call>"}}</tool_call>'
    )
    assert left == '<tool_call>{"bad'
    assert [(call.name, call.arguments) for call in calls] == [("a", '{"t": "</tool_call>"}')]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.text(min_size=1, max_size=9), st.dictionaries(st.text(max_size=5), JSON, max_size=3)
        ),
        max_size=3,
    ),
    st.booleans(),
)
def test_any_calls_survive_being_written_and_parsed(
    calls: list[tuple[str, dict[str, Any]]], ascii: bool
) -> None:
    written = [
        json.dumps({"name": name, "arguments": arguments}, ensure_ascii=ascii)
        for name, arguments in calls
    ]
    left, parsed = parse_tool_calls(
        "so" + "".join(f"<tool_call>{text}</tool_call>" for text in written)
    )
    assert left == "so"
    assert [(call.name, json.loads(call.arguments)) for call in parsed] == calls
