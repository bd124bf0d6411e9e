"""JSON values that are odd for any field: numbers, nests, schemas, grammars."""

from typing import Any

from hypothesis import strategies as st

from benchmarks.fuzz.cases.json_text import Members, Token
from benchmarks.fuzz.cases.texts import names, odd, texts

NUMBERS = tuple(
    map(
        Token,
        (
            "0",
            "-0",
            "-1",
            "0.5",
            "1e400",
            "-1e400",
            "1e-400",
            "2147483648",
            "4294967296",
            "9007199254740993.0",
            "18446744073709551616",
            "NaN",
            "-Infinity",
            "7" * 5000,
        ),
    )
)
NESTS = tuple(
    Token(text)
    for depth in (50, 900, 20_000)
    for text in ("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth)
)
numbers = st.sampled_from(NUMBERS)
values = st.one_of(
    st.none(),
    st.booleans(),
    numbers,
    texts,
    st.sampled_from(NESTS),
    st.lists(texts, max_size=3),
    st.builds(lambda name, one, two: Members(((name, one), (name, two))), names, texts, numbers),
    st.dictionaries(names, st.one_of(texts, numbers), max_size=3),
)
# Of 12 patterns that overlap a grammar is large, of 20 it is larger than any limit.
_BOMB = {
    "type": "string",
    "allOf": [{"pattern": f".*{letter}.*"} for letter in "abcdefghijklmnopqrst"],
}
SCHEMAS: tuple[Any, ...] = (
    {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
    {"type": "integer"},
    {"enum": ["yes", "no"]},
    _BOMB,
    {**_BOMB, "allOf": _BOMB["allOf"][:12]},
    {},
    True,
    {"$ref": "#"},
    {"$ref": "http://127.0.0.1:9/schema"},
    {"$ref": "file:///etc/passwd"},
    {"enum": []},
    {"not": {}},
    {"const": "\ud800"},
    {"pattern": "("},
    {"pattern": "(a*)*b"},
    {"type": "string", "minLength": 1_000_000_000},
    {"type": "array", "minItems": 1_000_000_000, "items": {"type": "integer"}},
    {"type": "number", "multipleOf": 0},
    {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(600)}},
    {"anyOf": [{"$ref": "#/anyOf/0"}]},
)
schemas = st.one_of(st.sampled_from(SCHEMAS), st.dictionaries(names, values, max_size=2))
GRAMMARS = (
    "start: /[ab]+/",
    "start: start",
    "start: a\na: start a",
    'start: "a"~1000000',
    "start: /((a*)*)*b/",
    "root ::= root",
    "",
)
grammars = st.one_of(st.sampled_from(GRAMMARS), odd)
# Arguments of a call: JSON text within JSON text.
arguments = st.one_of(
    st.sampled_from(
        (
            "{}",
            '{"x": 1}',
            '{"x": 1e400}',
            '{"x": 1, "x": 2}',
            '{"x": "\\ud800"}',
            '{"x": 9007199254740993.0}',
            '{"x": NaN}',
            "{",
            "[]",
            '"text"',
            "[" * 900,
            '{"x": "<|im_end|>"}',
        )
    ),
    odd,
)
