"""Calls whose texts are raw are held to the schema at every depth, and are read again as they were written."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from llguidance import LLMatcher
from transformers import PreTrainedTokenizerFast

from kvrecall.domain.answer.constraints import (
    RAW_CALLS,
    TEXT_GRAMMAR,
    Constraint,
    ToolChoice,
    to_grammar_schema,
)
from kvrecall.protocol.v1 import worker_pb2 as pb
from tests.workers.generation.test_guide import Answer
from tests.workers.model.architectures.family import Family
from tests.workers.model.architectures.windows import WINDOWED
from tests.workers.model.families import FAMILIES
from tests.workers.model.test_guided_families import make
from workers.engine.settings import WorkerSettings
from workers.model.grammars import Grammars
from workers.model.tokenizer import ChatTokenizer

ROWS = 1600
"""Of a slot: the tools are rendered byte by byte."""
REQUIRED = Constraint(tool_choice=ToolChoice.REQUIRED)
NODE = {
    "type": "object",
    "properties": {"v": {"type": "string"}, "next": {"$ref": "#/$defs/Node"}},
    "required": ["v"],
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "nodes": {
            "type": "array",
            "items": {"$ref": "#/$defs/Node"},
            "minItems": 1,
            "maxItems": 3,
        },
        "map": {"type": "object", "additionalProperties": {"type": ["integer", "null"]}},
        "any": {},
        "choice": {"enum": ["a", 2, {"k": [True, "b"]}]},
        "either": {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 3, "maximum": 9}]},
        "two words": {"type": "boolean"},
        "none": {"type": "object", "additionalProperties": False},
        "code": {"type": "string", TEXT_GRAMMAR: 'start: "x" /[0-9]+/'},
    },
    "required": ["nodes"],
    "additionalProperties": False,
    "$defs": {"Node": NODE},
}
WHOLE = {**SCHEMA, "required": list(SCHEMA["properties"])}
ONE = "nodes:[{v:<>n<>}]"
NODES = [{"v": "n"}]
# Arguments as they are written, with `<>` for the mark around texts, and as they are read.
HELD: list[tuple[str, dict[str, Any]]] = [
    (
        'nodes:[{v:<>a "b", {c}\\n\n:<>,next:{v:<><>}}]',
        {"nodes": [{"v": 'a "b", {c}\\n\n:', "next": {"v": ""}}]},
    ),
    ("nodes:[{v:<>1<>},{v:<>2<>},{v:<>3<>}]", {"nodes": [{"v": each} for each in "123"]}),
    (ONE + ",map:{a:1,b.c:null}", {"nodes": NODES, "map": {"a": 1, "b.c": None}}),
    (ONE + ",map:{}", {"nodes": NODES, "map": {}}),
    (
        ONE + ",any:[1,{x:<>y<>},-2.5,[],true]",
        {"nodes": NODES, "any": [1, {"x": "y"}, -2.5, [], True]},
    ),
    (ONE + ",choice:{k:[true,<>b<>]}", {"nodes": NODES, "choice": {"k": [True, "b"]}}),
    (ONE + ",choice:2,either:<>z<>", {"nodes": NODES, "choice": 2, "either": "z"}),
    (ONE + ",either:7,<>two words<>:false", {"nodes": NODES, "either": 7, "two words": False}),
    (ONE + ",none:{},code:<>x12<>", {"nodes": NODES, "none": {}, "code": "x12"}),
]
UNHELD = [
    "",
    "nodes:[]",
    "nodes:[{v:<>n<>},{v:<>n<>},{v:<>n<>},{v:<>n<>}]",
    "nodes:[{next:{v:<>n<>}}]",
    "nodes:[{v:7}]",
    "nodes:[{v:n}]",
    ONE + ",map:{a:true}",
    ONE + ",choice:<>b<>",
    ONE + ",choice:{k:[true]}",
    ONE + ",either:12",
    ONE + ",other:1",
    ONE + ",none:{a:1}",
    ONE + ",code:<>y<>",
    ONE + ",any:{a b:1}",
    'nodes:[{"v":<>n<>}]',
]
CALL = {
    "gemma": ('<|"|>', "<|tool_call>call:f{", "}<tool_call|>"),
    "function-gemma": ("<escape>", "<start_function_call>call:f{", "}<end_function_call>"),
}


def make_tool(schema: dict[str, Any], **members: Any) -> str:
    return json.dumps(
        {"type": "function", "function": {"name": "f", "parameters": schema, **members}}
    )


def write(family: str, arguments: str) -> str:
    """Write a call of `f`."""
    quote, opening, closing = CALL[family]
    return f"{opening}{arguments.replace('<>', quote)}{closing}"


def read(answer: Answer) -> Any:
    """Read the arguments of an answer's only call."""
    answer.stream.finish()
    (call,) = answer.stream.parse().calls
    return json.loads(call.arguments)


@pytest.fixture(scope="module", params=sorted(RAW_CALLS))
def family(request: pytest.FixtureRequest) -> str:
    """Forms with raw texts."""
    name: str = request.param
    return name


@pytest.fixture(scope="module", params=["tokens", "texts"])
def model(request: pytest.FixtureRequest, family: str, tokenizer: ChatTokenizer) -> ChatTokenizer:
    """A tokenizer of the family, whose marks are tokens of their own or texts like any other."""
    made = make(tokenizer, family)
    if request.param == "texts":
        plain = ChatTokenizer(tokenizer.inner, tokenizer.eos_token_ids)
        object.__setattr__(plain, "format", made.format)
        return plain
    return made


def test_both_forms_are_tried() -> None:
    assert set(CALL) == RAW_CALLS


@pytest.mark.parametrize(("arguments", "value"), HELD)
def test_arguments_of_the_schema_may_come_and_are_read(
    arguments: str, value: dict[str, Any], family: str, model: ChatTokenizer
) -> None:
    answer = Answer(model, REQUIRED, tools=(make_tool(SCHEMA, strict=True),))
    assert answer.say(write(family, arguments))
    assert answer.may_end
    assert read(answer) == value


@pytest.mark.parametrize("arguments", UNHELD)
def test_other_arguments_may_not_come(arguments: str, family: str, model: ChatTokenizer) -> None:
    answer = Answer(model, REQUIRED, tools=(make_tool(SCHEMA, strict=True),))
    assert not answer.say(write(family, arguments))


@pytest.mark.parametrize(
    ("schema", "arguments", "value"),
    [
        ({}, "a:{b:[<>c<>]}", {"a": {"b": ["c"]}}),
        ({"properties": {"a": {"$ref": "#/$defs/None"}}}, "a:[1]", {"a": [1]}),
        (
            {"properties": {"a": {"type": "string", "required": True, "maxLength": 1}}},
            "a:<>bc<>",
            {"a": "bc"},
        ),
        ({"properties": {"a": {"type": "array", "minItems": "2"}}}, "a:[]", {"a": []}),
        ({"properties": {"a": {"oneOf": [{"type": "null"}, {"const": 1}]}}}, "a:1", {"a": 1}),
        ({"properties": {"a": True, "b": {"properties": {}}}}, "a:1,b:{}", {"a": 1, "b": {}}),
        ({"properties": {"a": {"$ref": "#"}}}, "a:{a:{}}", {"a": {"a": {}}}),
    ],
)
def test_what_cannot_be_held_of_a_schema_is_free(
    schema: dict[str, Any],
    arguments: str,
    value: dict[str, Any],
    family: str,
    tokenizer: ChatTokenizer,
) -> None:
    answer = Answer(make(tokenizer, family), REQUIRED, tools=(make_tool(schema),))
    assert answer.say(write(family, arguments))
    assert read(answer) == value


def test_schemas_within_each_other_are_followed_to_a_depth(
    family: str, tokenizer: ChatTokenizer
) -> None:
    """Deeper ones are any value, and none is too deep to be looked through."""
    model = make(tokenizer, family)
    for levels, held in ((20, True), (200, False)):
        schema: dict[str, Any] = {"type": "integer"}
        for _ in range(levels):
            schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
        text = "a:{" * min(levels - 1, 40) + "a:<>b<>" + "}" * min(levels - 1, 40)
        said = Answer(model, REQUIRED, tools=(make_tool(schema),)).say(write(family, text))
        assert said == (not held)


@pytest.fixture(scope="module")
def guided(
    family: str,
    byte_level: Callable[..., PreTrainedTokenizerFast],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Family]:
    """A tiny Gemma with random weights, and the family's template and tokens."""
    form = FAMILIES["gemma4" if family == "gemma" else "gemma"]
    inner = byte_level(form.template, form.end, form.special, form.added)
    chat = ChatTokenizer(inner, (inner.eos_token_id,))
    tiny = WINDOWED["gemma3_text"]
    sized = replace(tiny, settings={**tiny.settings, "vocab_size": len(inner)})
    settings = WorkerSettings(slots=1, max_budget=ROWS, block_tokens=64)
    made = Family(sized, chat, tmp_path_factory.mktemp("rows"), settings)
    yield made
    made.close()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("seed", range(6))
def test_calls_of_a_guided_model_are_valid_for_the_schema(
    seed: int, family: str, guided: Family, tokenizer: ChatTokenizer
) -> None:
    """What a model with random weights calls.

    Texts, arrays and objects end sooner or later by a bias, and no number has an exponent that no double holds.
    """
    guided.open(f"s{seed}", ROWS, tools=[make_tool(WHOLE, strict=True)])
    inner = guided.tokenizer.inner
    biases = {CALL[family][0]: 6.0, "}": 4.0, "]": 4.0, "e": -100.0, "E": -100.0}
    ids = inner.get_vocab()
    done = guided.turn(
        f"s{seed}",
        "hello",
        constraint=pb.Constraint(tool_choice="required", single_call=True),
        logit_bias=[pb.TokenBias(id=ids[text], bias=bias) for text, bias in biases.items()],
        temperature=1.0,
        seed=seed,
        max_tokens=400,
    )
    assert done.finish_reason == "tool_calls"
    (call,) = done.message.tool_calls
    assert call.name == "f"
    assert is_valid(call.arguments, tokenizer)


def is_valid(arguments: str, tokenizer: ChatTokenizer) -> bool:
    """Check arguments by the grammar of the same schema for JSON.

    That has no escapes of odd characters, and no grammar of a text.
    """
    properties = {**SCHEMA["properties"], "code": {"type": "string", "pattern": "^x[0-9]+$"}}
    text = json.dumps(to_grammar_schema({**WHOLE, "properties": properties}, True))
    vocabulary = Grammars(tokenizer).vocabulary
    matcher = LLMatcher(vocabulary, LLMatcher.grammar_from_json_schema(text))
    plain = re.sub(r"\\(u[0-9a-f]{4}|.)", "?", json.dumps(json.loads(arguments)))
    tokens = vocabulary.tokenize_str(plain)
    return matcher.consume_tokens(tokens) and matcher.is_accepting()
