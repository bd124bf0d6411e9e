"""Constraints that no worker could follow are refused by the member and the keyword at fault."""

import json
from typing import Any

import pytest

from kvrecall.domain.constraints import FREE, Constraint, ToolChoice
from kvrecall.domain.errors import InvalidRequest
from services.planning.constraints import check_constraint

UNSUPPORTED = {"type": "object", "properties": {"a": {"not": {}}}}


def make_tool(name: str, **members: Any) -> str:
    return json.dumps({"type": "function", "function": {"name": name, **members}})


async def refuse(constraint: Constraint, *tools: str, can_call: bool = True) -> tuple[str, str]:
    """The field and the message of the refusal."""
    with pytest.raises(InvalidRequest) as refused:
        await check_constraint(constraint, tools, can_call)
    return str(refused.value.details["field"]), refused.value.message


async def test_a_strict_schema_is_refused_with_its_keyword() -> None:
    schema = json.dumps(UNSUPPORTED)
    assert (await refuse(Constraint(schema, strict=True)))[0] == "response_format"
    assert '"not"' in (await refuse(Constraint(schema, strict=True)))[1]
    await check_constraint(Constraint(schema), ())


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
    await check_constraint(Constraint(tool_choice=ToolChoice.NONE), tools)
    await check_constraint(Constraint(tools=("plain", "loose")), tools)
    await check_constraint(FREE, tools, can_call=False)


async def test_a_choice_that_cannot_be_made_is_refused() -> None:
    required = Constraint(tool_choice=ToolChoice.REQUIRED)
    assert (await refuse(required))[0] == "tool_choice"
    assert (await refuse(Constraint(tools=("fly",)), make_tool("go")))[0] == "tool_choice"
    assert (await refuse(required, make_tool("go"), can_call=False))[0] == "tool_choice"
    await check_constraint(required, [make_tool("go")])


async def test_a_schema_that_is_nested_without_end_is_refused() -> None:
    schema = '{"type": "array", "items": ' * 400 + "{}" + "}" * 400
    assert (await refuse(Constraint(schema)))[0] == "response_format"
