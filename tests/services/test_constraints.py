"""Constraints that no worker could follow are refused by the member and the keyword at fault."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from kvrecall.domain.answer.constraints import (
    FREE,
    KEYED_CALLS,
    RAW_CALLS,
    TAGGED_CALLS,
    UNGUIDED_CALLS,
    Constraint,
    ToolChoice,
)
from kvrecall.domain.errors import InvalidRequest
from kvrecall.sandbox.settings import SandboxSettings
from services.grammars import ConstraintChecks, GrammarChecks

CHECKS = ConstraintChecks(GrammarChecks(SandboxSettings(), lambda _: None))
UNSUPPORTED = {"type": "object", "properties": {"a": {"not": {}}}}


def make_tool(name: str, **members: Any) -> str:
    return json.dumps({"type": "function", "function": {"name": name, **members}})


async def check_constraint(constraint: Constraint, tools: Sequence[str], call_format: str) -> None:
    await CHECKS.check(constraint, tools, call_format, "ann")


async def refuse(
    constraint: Constraint, *tools: str, call_format: str = "hermes"
) -> tuple[str, str]:
    """The field and the message of the refusal."""
    with pytest.raises(InvalidRequest) as refused:
        await check_constraint(constraint, tools, call_format)
    return str(refused.value.details["field"]), refused.value.message


async def test_a_strict_schema_is_refused_with_its_keyword() -> None:
    schema = json.dumps(UNSUPPORTED)
    assert (await refuse(Constraint(schema, strict=True)))[0] == "response_format"
    assert '"not"' in (await refuse(Constraint(schema, strict=True)))[1]
    await check_constraint(Constraint(schema), (), "hermes")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "wat"},
        {"$ref": "#/$defs/missing"},
        {"$ref": "http://127.0.0.1:1/schema"},
        {"type": "string", "pattern": "(?=a)b"},
        {"enum": []},
    ],
)
async def test_what_is_no_schema_is_refused_also_if_it_is_not_strict(schema: Any) -> None:
    field, _ = await refuse(Constraint(json.dumps(schema)))
    assert field == "response_format"


async def test_options_of_the_compiler_are_not_the_clients() -> None:
    schema = json.dumps(UNSUPPORTED | {"x-guidance": {"lenient": True}})
    assert (await refuse(Constraint(schema, strict=True)))[0] == "response_format"


async def test_a_strict_tools_schema_is_refused_where_it_may_be_called() -> None:
    tools = [
        make_tool("plain"),
        make_tool("odd", strict=True, parameters=UNSUPPORTED),
        make_tool("loose", parameters=UNSUPPORTED),
    ]
    assert (await refuse(FREE, *tools))[0] == "tools[1].function.parameters"
    await check_constraint(Constraint(tool_choice=ToolChoice.NONE), tools, "hermes")
    await check_constraint(Constraint(tools=("plain", "loose")), tools, "hermes")
    await check_constraint(FREE, tools, "")


@pytest.mark.parametrize("template", sorted(UNGUIDED_CALLS))
async def test_what_only_a_grammar_can_hold_is_refused_where_calls_have_none(template: str) -> None:
    """Calls of such a form are read, but nothing holds them to anything."""
    plain, strict = make_tool("plain"), make_tool("odd", strict=True)
    assert (await refuse(FREE, plain, strict, call_format=template))[
        0
    ] == "tools[1].function.strict"
    refused: list[tuple[Constraint, str]] = [
        (Constraint(tool_choice=ToolChoice.REQUIRED), "tool_choice"),
        (Constraint(tools=("plain",)), "tool_choice"),
        (Constraint(single_call=True), "parallel_tool_calls"),
    ]
    for constraint, field in refused:
        assert (await refuse(constraint, plain, call_format=template))[0] == field
    none = Constraint(tool_choice=ToolChoice.NONE, single_call=True)
    await check_constraint(none, [plain, strict], template)
    await check_constraint(Constraint(single_call=True), [], template)
    await check_constraint(FREE, [plain], template)


@pytest.mark.parametrize("call_format", sorted(TAGGED_CALLS | KEYED_CALLS))
@pytest.mark.parametrize(
    ("parameters", "keyword"),
    [
        ({"properties": {"a": {"type": "string", "pattern": "[a-z]+"}}}, "properties.a.pattern"),
        ({"properties": {"a": {"type": "string", "maxLength": 3}}}, "properties.a.maxLength"),
        ({"properties": {}, "minProperties": 1}, "minProperties"),
        ({"properties": {"a": {}}, "required": ["a", "b"]}, "required"),
        ({"properties": {"a": {"type": "string", "enum": ["x"]}, "b": {"const": 3}}}, ""),
        ({"properties": {"a": {"type": "string", "const": "x", "description": "y"}}}, ""),
        ({"properties": {"a": {"type": "array", "items": {"type": "string"}, "maxItems": 2}}}, ""),
    ],
)
async def test_a_strict_tool_of_single_arguments_is_held_to_all_its_keywords_or_refused(
    parameters: dict[str, Any], keyword: str, call_format: str
) -> None:
    tool = make_tool("f", strict=True, parameters={"type": "object", **parameters})
    await check_constraint(FREE, [tool], "hermes")
    await check_constraint(FREE, [make_tool("f", parameters=parameters)], call_format)
    if not keyword or (call_format in KEYED_CALLS and keyword.startswith("properties.")):
        await check_constraint(FREE, [tool], call_format)
        return
    field, message = await refuse(FREE, tool, call_format=call_format)
    assert field == "tools[0].function.parameters"
    assert f"'{keyword}'" in message


@pytest.mark.parametrize("call_format", sorted(RAW_CALLS))
async def test_a_strict_tool_of_raw_texts_is_held_to_all_its_keywords_or_refused(
    call_format: str,
) -> None:
    place = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    parameters = {"type": "object", "properties": {"to": {"type": "array", "items": place}}}
    tool = make_tool("f", strict=True, parameters=parameters)
    for constraint in (FREE, Constraint(tool_choice=ToolChoice.REQUIRED, tools=("f",))):
        await check_constraint(constraint, [tool], call_format)
    await check_constraint(Constraint(single_call=True), [tool], call_format)
    parameters = {**parameters, "properties": {"to": {"type": "string", "maxLength": 3}}}
    await check_constraint(FREE, [make_tool("f", parameters=parameters)], call_format)
    strict = make_tool("f", strict=True, parameters=parameters)
    field, message = await refuse(FREE, strict, call_format=call_format)
    assert field == "tools[0].function.parameters"
    assert "'properties.to.maxLength'" in message


async def test_a_choice_that_cannot_be_made_is_refused() -> None:
    required = Constraint(tool_choice=ToolChoice.REQUIRED)
    assert (await refuse(required))[0] == "tool_choice"
    assert (await refuse(Constraint(tools=("fly",)), make_tool("go")))[0] == "tool_choice"
    assert (await refuse(required, make_tool("go"), call_format=""))[0] == "tool_choice"
    await check_constraint(required, [make_tool("go")], "hermes")


async def test_a_schema_that_is_nested_without_end_is_refused() -> None:
    schema = '{"type": "array", "items": ' * 400 + "{}" + "}" * 400
    assert (await refuse(Constraint(schema)))[0] == "response_format"


def make_text_tool(grammar: str) -> str:
    text = {"type": "string", "x-grammar": grammar}
    return make_tool("edit", parameters={"type": "object", "properties": {"input": text}})


@pytest.mark.parametrize("call_format", ["hermes", "qwen-xml", "lfm2"])
@pytest.mark.parametrize(
    ("grammar", "named"),
    [
        ("start: missing", "missing"),
        ("start: <|im_end|>", "'<'"),
        ('start: %json {"type": "object"}', "'%json'"),
        ("start: @other", "'@'"),
        ("start: /(?=a)b/", "look-around"),
    ],
)
async def test_a_grammar_that_cannot_be_followed_is_refused(
    grammar: str, named: str, call_format: str
) -> None:
    field, message = await refuse(FREE, make_text_tool(grammar), call_format=call_format)
    assert field == "tools[0].function.parameters"
    assert named in message
    await check_constraint(FREE, [make_text_tool('start: "a" /b+/')], call_format)
