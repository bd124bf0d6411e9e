"""Values that are no JSON become JSON as they arrive."""

import json
from typing import Any

import pytest

from workers.model.calls.source import CallSource, Malformed
from workers.model.calls.values import JSON, PYTHON, Values

QUOTED = Values(raw_quotes=('<|"|>',), bare_keys=True)


def read(values: Values, text: str) -> Any:
    """The value at a text's beginning, given character by character."""
    source = CallSource()
    pieces: list[str] = []
    reading = values.pass_value(source, pieces.append)
    try:
        for char in text:
            source.push(char)
            next(reading)
        source.ended = True
        next(reading)
    except StopIteration:
        return json.loads("".join(pieces))
    raise AssertionError("it waits for more")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("True,", True),
        ("[None, False, -1.5e3]", [None, False, -1500.0]),
        ("[true, null]", [True, None]),
        ("'it\\'s \"so\"'", 'it\'s "so"'),
        ('"it\'s"', "it's"),
        (r"'a\d\\ \n\t\x41\u00e9\U0001F600\0'", "a\\d\\ \n\tAé😀\0"),
        ("'two\\\nlines'", "twolines"),
        ("{'a': {'b': [1, 'c']}, \"d\": ''}", {"a": {"b": [1, "c"]}, "d": ""}),
        (r"'\ud83d\ude00 \ud83d'", "😀 \ufffd"),
    ],
)
def test_values_of_python(text: str, value: Any) -> None:
    assert read(PYTHON, text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('<|"|>say "it" \\n<|"|>', 'say "it" \\n'),
        (
            '{a:<|"|>x<|"|>,b:[1,true,null],c:{d:<|"|><|"|>}}',
            {"a": "x", "b": [1, True, None], "c": {"d": ""}},
        ),
        ('{<|"|>a b<|"|>:1}', {"a b": 1}),
        ('"plain"', "plain"),
        ('<|"|>a<|b<|"|>', "a<|b"),
    ],
)
def test_values_in_quotes_of_their_own(text: str, value: Any) -> None:
    assert read(QUOTED, text) == value


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (JSON, "'a'"),
        (JSON, "{a: 1}"),
        (JSON, r'"\x41"'),
        (JSON, "True "),
        (PYTHON, "name "),
        (PYTHON, "f(1)"),
        (PYTHON, r"'\U99999999'"),
        (PYTHON, "(1, 2)"),
        (QUOTED, "Oslo,"),
        (QUOTED, "<|a"),
        (PYTHON, "[" * 90),
    ],
)
def test_what_is_no_value_is_malformed(values: Values, text: str) -> None:
    with pytest.raises(Malformed):
        read(values, text)
