"""The arguments of calls are passed on as they arrive, and add up to the calls that were made."""

import json
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic_core import from_json

from tests.workers.model.written_calls import CALLS, SPELLED, TAGGED, write
from workers.model.answer_format import AnswerFormat
from workers.model.answer_formats import _FAMILIES
from workers.model.call_stream import CallStream
from workers.model.calls.keyed_calls import KeyedCalls
from workers.model.calls.sink import CallPiece, ParsedCall

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
        },
    }
    for name in ("write", "run.it")
]
FORMS: dict[str, AnswerFormat] = {form.name: form for _, form in _FAMILIES}
# Strings that a form or JSON could stumble over.
ODD = [
    "{",
    "}",
    '"',
    "\\",
    "</tool_call>",
    "<tool_call>",
    "\n",
    "é",
    "😀",
    "\u2028",
    "'",
    "<|",
    "</arg_value>",
    "[ARGS]",
    ";",
    "",
]
TEXT = st.lists(st.sampled_from(ODD) | st.characters(exclude_categories=["Cs"]), max_size=6).map(
    "".join
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(-1e9, 1e9) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
CALL = st.tuples(st.sampled_from(["write", "run.it"]), st.dictionaries(TEXT, JSON, max_size=3))


@dataclass
class Told:
    """What a client is told of an answer, put together as it would."""

    text: str = ""
    names: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    whole: list[ParsedCall] = field(default_factory=list)

    def add(self, pieces: tuple[CallPiece, ...]) -> None:
        for piece in pieces:
            if piece.index == len(self.names):
                self.names.append(piece.name)
                self.arguments.append("")
            assert piece.index == len(self.names) - 1, "one call after the other"
            assert piece.name == self.names[-1]
            self.arguments[-1] += piece.arguments
            if piece.call is not None:
                self.whole.append(piece.call)
                assert len(self.whole) == len(self.names)


def tell(form: AnswerFormat, pieces: list[str]) -> Told:
    """Stream an answer in these pieces; what was told agrees with the answer's parts."""
    stream = CallStream(form, TOOLS, enabled=True)
    told = Told()
    for piece in pieces:
        text, calls = stream.push(piece)
        told.text += text
        told.add(calls)
        for arguments in told.arguments:
            from_json(arguments, allow_partial="trailing-strings")  # the beginning of JSON
    calls, text = stream.finish()
    told.add(calls)
    told.text += text
    assert told.whole == list(stream.calls)
    assert told.arguments == [call.arguments for call in told.whole]
    assert told.names == [call.name for call in told.whole]
    assert told.text.strip() == stream.text.strip()
    return told


def cut(text: str, places: list[int]) -> list[str]:
    """Cut a text at places, which are taken modulo its length."""
    at = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[start:stop] for start, stop in pairwise(at)]


def name_keys(form: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments with other keys where a form has only names as keys."""
    keyed = isinstance(FORMS[form].read, KeyedCalls) or form == "llama4"
    return {f"k{n}": it for n, it in enumerate(arguments.values())} if keyed else arguments


PLACES = st.lists(st.integers(0, 400), max_size=12)
STYLE = st.sampled_from(
    [
        {},
        {"ensure_ascii": False},
        {"indent": 1},
        {"separators": (",", ":"), "ensure_ascii": False},
    ]
)


@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from(sorted(SPELLED)),
    st.lists(CALL, max_size=3),
    STYLE,
    PLACES,
)
def test_any_calls_are_told_whole_wherever_they_are_cut(
    form: str, calls: list[tuple[str, dict[str, Any]]], style: dict[str, Any], places: list[int]
) -> None:
    calls = [(name, name_keys(form, arguments)) for name, arguments in calls]
    text = "So. " + write(form, calls, **style)
    told = tell(FORMS[form], cut(text, places))
    assert told.text == "So. "
    assert all(call.complete for call in told.whole)
    assert [(call.name, call.arguments) for call in told.whole] == [
        (name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls
    ]


@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from(sorted(FORMS)),
    st.lists(CALL, min_size=1, max_size=2),
    st.integers(0, 500),
    st.sampled_from(["", "}", '"', " and more", "<tool_call>", "]}"]),
    PLACES,
)
def test_what_was_told_of_a_call_that_breaks_off_stays_true(
    form: str, calls: list[tuple[str, dict[str, Any]]], end: int, rest: str, places: list[int]
) -> None:
    whole = write(form, calls)
    text = whole[: end % len(whole)] + rest
    told = tell(FORMS[form], cut(text, places))
    at_once = tell(FORMS[form], [text])
    assert (told.whole, told.text.strip()) == (at_once.whole, at_once.text.strip())
    for call in told.whole:
        if call.complete:
            assert isinstance(json.loads(call.arguments), dict)


@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from(sorted(TAGGED)),
    st.lists(st.tuples(st.sampled_from(["text", "n"]), TEXT), max_size=3, unique_by=lambda x: x[0]),
    PLACES,
)
def test_values_in_tags_become_json_as_they_arrive(
    form: str, values: list[tuple[str, str]], places: list[int]
) -> None:
    assume(form != "glm" or not any("</arg_value>" in value for _, value in values))
    text = write(form, [("write", dict(values)), ("run.it", {})])
    told = tell(FORMS[form], cut(text, places))
    assert told.text == ""
    found = [json.loads(call.arguments) for call in told.whole]
    expected = {key: value if key == "text" else _read(value) for key, value in values}
    assert (told.names, found) == (["write", "run.it"], [expected, {}])


@pytest.mark.parametrize("form", sorted(CALLS))
def test_a_call_is_told_alike_wherever_it_is_cut_in_two_or_ends(form: str) -> None:
    family = FORMS[form]
    written = CALLS[form].removeprefix("<|channel|>commentary").removesuffix("<|call|>")
    answer = f"So. {written}"
    whole = tell(family, [answer])
    assert [call.name for call in whole.whole] == ["weather"]
    for place in range(len(answer)):
        assert tell(family, [answer[:place], answer[place:]]) == whole
        cut_off, slowly = tell(family, [answer[:place]]), tell(family, list(answer[:place]))
        assert (cut_off.whole, cut_off.text) == (slowly.whole, slowly.text)
        for call in cut_off.whole:
            assert whole.whole[0].arguments.startswith(call.arguments)
            assert cut_off.text == "So. "


def _read(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value


def test_a_text_is_passed_on_character_by_character_while_it_is_generated() -> None:
    said = 'a "quoted" {brace} line'
    for form, text in (
        ("hermes", write("hermes", [("write", {"text": said})])),
        ("qwen-xml", f"<tool_call><function=write><parameter=text>{said}</parameter></function>"),
    ):
        stream = CallStream(FORMS[form], TOOLS, enabled=True)
        pieces = [piece for char in text for piece in stream.push(char)[1]]
        assert len(pieces) > len(said), form
        assert max(len(piece.arguments) for piece in pieces) < 14, form


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"a": "b', '{"a": "b'),
        ('{"a": "b\\u00', '{"a": "b'),
        ('{"a": "b\\ud83d', '{"a": "b'),
        ('{"a": 12', '{"a": '),
        ('{"a": tru', '{"a": '),
        ("{", "{"),
        ('{"a"', '{"a"'),
    ],
)
def test_a_call_that_is_cut_off_keeps_what_was_told_of_it(text: str, arguments: str) -> None:
    told = tell(FORMS["hermes"], [f'<tool_call>{{"name": "write", "arguments": {text}'])
    assert told.whole == [ParsedCall("write", arguments, complete=False)]
    assert told.text == ""


def test_what_follows_a_malformed_place_is_text_behind_the_call() -> None:
    told = tell(
        FORMS["hermes"], ['<tool_call>{"name": "write", "arguments": {"a": 1, b}}</tool_call>']
    )
    assert told.whole == [ParsedCall("write", '{"a": 1, ', complete=False)]
    assert told.text == "b}}</tool_call>"


def test_a_call_without_its_end_mark_is_complete_and_the_mark_is_not_text() -> None:
    for rest in ("", "}", "}\n</tool_", "}</tool_call>"):
        told = tell(FORMS["hermes"], [f'<tool_call>{{"name": "write", "arguments": {{}}{rest}'])
        assert (told.whole, told.text) == ([ParsedCall("write", "{}")], ""), rest


def test_arguments_may_come_before_the_name_or_not_at_all() -> None:
    for body, arguments in (
        ('{"arguments": {"a": [1]}, "name": "write"}', '{"a": [1]}'),
        ('{"name": "write"}', "{}"),
        ('{"id": {"x": 1}, "name": "write", "arguments": {}, "arguments": {"b": 1}}', "{}"),
    ):
        told = tell(FORMS["hermes"], list(f"<tool_call>{body}</tool_call>"))
        assert told.whole == [ParsedCall("write", arguments)]


def test_half_of_a_character_and_bare_line_breaks_become_json_that_all_clients_read() -> None:
    body = (
        '{"name": "write", "arguments": {"text": "\\ud83d \\ude00 \\ud83d\\ude00\n\\ud83d\\u00e9"}}'
    )
    told = tell(FORMS["hermes"], list(f"<tool_call>{body}</tool_call>"))
    assert told.whole == [ParsedCall("write", '{"text": "\ufffd \ufffd 😀\\n\ufffdé"}')]


@pytest.mark.parametrize("value", ["NaN", "1e999", "01", "nul", "'a'", "[" * 90 + "]" * 90])
def test_what_is_no_json_is_never_told(value: str) -> None:
    text = f'<tool_call>{{"name": "write", "arguments": {{"a": {value}}}}}</tool_call>'
    told = tell(FORMS["hermes"], list(text))
    assert [call.complete for call in told.whole] == [False]
