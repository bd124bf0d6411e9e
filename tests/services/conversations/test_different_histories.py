"""Histories that a model would read differently are different; what is promised to be equal stays so."""

import json
import random
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_core import from_json

from kvrecall.domain.messages import Message, ToolCall
from services.conversations.histories import build_history, canonical_json

TEXTS = st.text(alphabet="a \n\u00e9", max_size=3)
NAMES = st.sampled_from(["", "ann", "bob"])
NUMBERS = st.sampled_from(
    [
        *("0", "-0", "0.0", "-0.0", "1", "1.0", "1.00", "1e0", "10E-1", "1e400", "2e400", "-1e400"),
        *("Infinity", "NaN", "0.1", "0.1000000000000000055", "9007199254740992", "1e-999999999"),
        *("9007199254740993", "9007199254740992.0", "9007199254740993.0", "1" * 5000),
    ]
)


def write(value: Any, draw: Any) -> str:
    """A JSON text of a value, with spaces, order, escapes and doubled members as they are drawn."""
    space = draw(st.sampled_from(["", " ", "\n"]))
    if isinstance(value, dict):
        members = [(key, each) for key, each in value.items()]
        members = draw(st.permutations(members + draw(st.sampled_from([[], members[:1]]))))
        texts = [f"{write(key, draw)}{space}:{write(each, draw)}" for key, each in members]
        return "{" + space + f"{space},".join(texts) + space + "}"
    if isinstance(value, list):
        return "[" + ",".join(write(each, draw) for each in value) + space + "]"
    if isinstance(value, str) and value.startswith("#"):
        return value[1:]
    return json.dumps(value, ensure_ascii=draw(st.booleans()))


VALUES = st.recursive(
    NUMBERS.map(lambda text: f"#{text}") | TEXTS | st.sampled_from([None, True, False]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=3,
)
OBJECTS = st.dictionaries(st.sampled_from(["x", "y", "\u00e9"]), VALUES, max_size=2)


@st.composite
def histories(draw: st.DrawFn) -> list[Message]:
    """Short histories over few texts, so that two of them are often nearly the same."""
    said = [Message(draw(st.sampled_from(["system", "user"])), draw(TEXTS), name=draw(NAMES))]
    calls = tuple(
        ToolCall(f"c{number}", draw(st.sampled_from("fg")), write(draw(OBJECTS), draw))
        for number in range(draw(st.integers(0, 1)))
    )
    said.append(Message("assistant", draw(TEXTS), calls, name=draw(NAMES)))
    said += [Message("tool", draw(TEXTS), tool_call_id=call.id, name=draw(NAMES)) for call in calls]
    return [*said, Message("user", draw(TEXTS), name=draw(NAMES))]


def read(text: str) -> Any:
    """What a template renders of arguments, members in any order."""
    try:
        return json.dumps(from_json(text, allow_partial="trailing-strings"), sort_keys=True)
    except ValueError:
        return text


def render(messages: tuple[Message, ...]) -> list[Any]:
    """All that a template may render, without the white space at the end of an answer."""
    return [
        (
            each.role,
            each.content.rstrip() if each.role == "assistant" else each.content,
            each.name,
            [(call.name, read(call.arguments)) for call in each.tool_calls],
        )
        for each in messages
    ]


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_histories_with_one_digest_are_rendered_alike(data: Any) -> None:
    first = data.draw(histories())
    second = list(first)
    at = data.draw(st.integers(0, len(first) - 1))
    second[at] = replace(
        second[at],
        content=data.draw(TEXTS | st.just(first[at].content + "\n")),
        name=data.draw(NAMES),
        tool_calls=tuple(
            replace(call, arguments=write(data.draw(OBJECTS), data.draw))
            for call in second[at].tool_calls
        ),
    )
    one, other = build_history(b"", first), build_history(b"", second)
    if one.digests[-1] == other.digests[-1]:
        assert render(one.messages) == render(other.messages)
    else:
        assert one.messages != other.messages


@settings(max_examples=400, deadline=None)
@given(value=OBJECTS, data=st.data())
def test_equal_canonical_arguments_have_equal_values(value: Any, data: Any) -> None:
    """Numbers are compared as they are written, without the exponent's or the last zeros' form."""
    other = data.draw(OBJECTS | st.just(value))
    texts = [write(each, data.draw) for each in (value, other)]
    if canonical_json(texts[0]) == canonical_json(texts[1]) and texts[0] != texts[1]:
        assert _exact(texts[0]) == _exact(texts[1])


def _exact(text: str) -> Any:
    """A JSON text's value: numbers with all their digits, members sorted, doubled ones refused."""

    def pairs(members: list[tuple[str, Any]]) -> Any:
        assert len(dict(members)) == len(members), "members of one name make a text of its own"
        return sorted(members)

    return json.loads(text, parse_float=_number, parse_int=_number, object_pairs_hook=pairs)


def _number(text: str) -> tuple[str, str]:
    """Sign and digits of a number; an integer is no float, since a template writes them apart."""
    kind = "float" if set(text) & set(".eE") else "int"
    value = Decimal(text)
    return kind, f"{value.is_signed()} {value.normalize()}" if value else str(value.is_signed())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"x":1e400}', '{"x":2e400}'),
        ('{"x":1e400}', '{"x":Infinity}'),
        ('{"x":9007199254740993.0}', '{"x":9007199254740992.0}'),
        ('{"x":0.1}', '{"x":0.1000000000000000055}'),
        ('{"x":1e-999}', '{"x":0.0}'),
        ('{"x":1e-99999999999999999999}', '{"x":0.0}'),
        ('{"x":1,"x":2}', '{"x":2}'),
        ('{"y":{"x":1,"x":2}}', '{"y":{"x":2}}'),
        ('{"x":-0}', '{"x":0}'),
        ('{"x":-0.0}', '{"x":0.0}'),
        ('{"x":1}', '{"x":1.0}'),
    ],
)
def test_arguments_that_read_differently_are_different(one: str, other: str) -> None:
    assert canonical_json(one) != canonical_json(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"x": 1, "y": [2, null]}', '{"y":[2,null],"x":1}'),
        ('{"x":"\\u00e9\\n"}', '{ "x": "\u00e9\\u000a" }'),
        ('{"x":100000.0}', '{"x":1e5}'),
        ('{"x":0.10}', '{"x":0.1}'),
        ('{"x":3.141592653589793}', '{"x":3.1415926535897930}'),
    ],
)
def test_arguments_that_a_client_has_written_again_are_the_same(one: str, other: str) -> None:
    assert canonical_json(one) == canonical_json(other)


@settings(max_examples=200, deadline=None)
@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=6,
    ),
    seed=st.integers(0, 99),
)
def test_any_value_that_python_writes_again_is_the_same(value: Any, seed: int) -> None:
    text = json.dumps({"value": value})
    again = json.loads(text)
    random.Random(seed).shuffle(members := list(again.items()))
    assert canonical_json(
        json.dumps(dict(members), indent=1, ensure_ascii=False)
    ) == canonical_json(text)


def test_the_indentation_of_an_answer_is_part_of_it() -> None:
    def digest(text: str) -> bytes:
        return build_history(b"", [Message("user", "go"), Message("assistant", text)]).digests[-1]

    assert digest("    return 1") != digest("return 1")
    assert digest("\u00a0x") != digest("x")
    assert digest("return 1\n\n") == digest("return 1")


def test_a_name_that_is_not_compared_is_not_rendered() -> None:
    call = ToolCall("c", "f", "{}")
    said = [
        Message("system", "s", name="a"),
        Message("user", "u", name="b"),
        Message("assistant", "", (call,), name="c"),
        Message("tool", "r", tool_call_id="c", name="d"),
    ]
    for mend in (False, True):
        history = build_history(b"", said, mend=mend)
        assert [each.name for each in history.messages] == ["", "b", "", ""]
