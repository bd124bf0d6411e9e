"""Grammars of answers are compiled in a sandbox first, and tools are relaxed as far as they must be."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from kvrecall.domain.answer.constraints import FREE, Constraint, ToolChoice
from kvrecall.sandbox.settings import SandboxSettings
from workers.errors import BadSettings, Overloaded
from workers.model.grammars import Grammars
from workers.model.tokenizer import ChatTokenizer

BOMB = {"type": "string", "allOf": [{"pattern": f".*{c}.*"} for c in "abcdefghijklmnopqrst"]}
REQUIRED = Constraint(tool_choice=ToolChoice.REQUIRED)


def make_tool(name: str, properties: dict[str, Any], **members: Any) -> str:
    parameters = {"type": "object", "properties": properties, "required": list(properties)[:1]}
    function = {"name": name, "parameters": parameters, **members}
    return json.dumps({"type": "function", "function": function})


@pytest.fixture
def grammars(tokenizer: ChatTokenizer) -> Iterator[Grammars]:
    # Tests run beside others: what they are about is CPU time, not the machine's.
    made = Grammars(tokenizer, SandboxSettings(seconds=60.0, waiting_seconds=60.0))
    yield made
    made.close()


def accepts(grammars: Grammars, tools: list[str], name: str, arguments: dict[str, Any]) -> bool:
    """Whether a call of a tool may be the answer."""
    text = f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
    matcher = grammars.build(REQUIRED, tools).whole
    assert matcher is not None
    tokens = grammars.vocabulary.tokenize_str(text)
    return matcher.deep_copy().validate_tokens(tokens) == len(tokens)


def test_what_takes_minutes_is_refused(grammars: Grammars) -> None:
    with pytest.raises(BadSettings, match="too complex"):
        grammars.build(Constraint(schema=json.dumps(BOMB)), ())
    with pytest.raises(BadSettings, match="too complex"):
        grammars.build(FREE, [make_tool("f", {"a": BOMB}, strict=True)])


def test_a_tool_of_an_impossible_schema_takes_any_object_and_others_keep_theirs(
    grammars: Grammars,
) -> None:
    faulty = make_tool("faulty", {"a": {"type": "string", "pattern": "("}})
    tools = [make_tool("sound", {"a": {"type": "integer"}}), faulty]
    assert accepts(grammars, tools, "faulty", {"b": 1})
    assert accepts(grammars, tools, "sound", {"a": 1})
    assert not accepts(grammars, tools, "sound", {"a": "text"})


def test_a_tool_that_takes_minutes_takes_any_object(grammars: Grammars) -> None:
    tools = [make_tool("bomb", {"a": BOMB}), make_tool("strict", {"a": {}}, strict=True)]
    assert accepts(grammars, tools, "bomb", {"a": "anything"})
    assert not accepts(grammars, tools, "strict", {"b": 1})


@pytest.mark.parametrize("number", [30, 128])
def test_many_large_tools_take_any_object_where_they_cannot_be_compiled_together(
    grammars: Grammars, number: int
) -> None:
    texts = {f"p{name}": {"type": "string", "description": "d"} for name in range(600)}
    tools = [make_tool(f"f{tool}", texts) for tool in range(number)]
    assert accepts(grammars, tools, f"f{number - 1}", {"p1": "x"})


def test_large_strict_tools_are_refused_with_a_reason_and_no_backtrace(grammars: Grammars) -> None:
    texts = {f"p{name}": {"type": "string", "description": "d"} for name in range(600)}
    tools = [make_tool(f"f{tool}", texts, strict=True) for tool in range(30)]
    with pytest.raises(BadSettings, match=r"too (large|complex)") as refused:
        grammars.build(FREE, tools)
    assert "panic" not in str(refused.value)


def test_an_object_of_six_hundred_members_can_be_followed(grammars: Grammars) -> None:
    texts = {f"p{name}": {"type": "string"} for name in range(600)}
    matcher = grammars.build(Constraint(schema=json.dumps({"properties": texts})), ()).whole
    assert matcher is not None
    started = matcher.deep_copy()
    assert started.consume_tokens(grammars.vocabulary.tokenize_str('{"p599'))
    assert started.compute_bitmask()
    assert not started.is_error(), started.get_error()


def test_what_there_is_no_time_for_is_refused_for_now(tokenizer: ChatTokenizer) -> None:
    busy = Grammars(tokenizer, SandboxSettings(seconds=0.001))
    with pytest.raises(Overloaded, match="try again later"):
        busy.build(Constraint(schema=json.dumps(BOMB)), ())
    busy.close()
