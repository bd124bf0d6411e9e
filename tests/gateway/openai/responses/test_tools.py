"""Tools of all types: how the model is offered them, and the items of their calls."""

import json
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import pytest
from openai.types.responses import ResponseOutputItem
from openai.types.responses.tool_param import ToolParam
from pydantic import TypeAdapter

from gateway.openai.responses.tools import HOSTED_TOOLS, place_tools
from kvrecall.protocol.v1 import worker_pb2 as pb

Json = dict[str, Any]
FUNCTION: Json = {"type": "function", "name": "f", "parameters": {"type": "object"}}
EDIT: Json = {
    "type": "custom",
    "name": "edit",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "a" /b+/'},
}
AGENTS = {
    "type": "namespace",
    "name": "agents",
    "description": "Other agents.",
    "tools": [{**FUNCTION, "name": "spawn"}, {"type": "custom", "name": "say"}],
}
SHELL = {"type": "shell", "environment": {"type": "local"}}
CONTAINER = {"type": "shell", "environment": {"type": "container_auto"}}
SEARCH = {"type": "tool_search", "execution": "client", "parameters": {"type": "object"}}
CLIENT_TOOLS = [
    FUNCTION,
    EDIT,
    AGENTS,
    SHELL,
    {"type": "local_shell"},
    {"type": "apply_patch"},
    SEARCH,
]
# Each tool of the model, what a model calls it with, and what the item of the call has.
CALLS: list[tuple[str, Json, Json]] = [
    ("f", {"n": 1}, {"type": "function_call", "name": "f", "arguments": '{"n": 1}'}),
    (
        "agents__spawn",
        {"n": 1},
        {
            "type": "function_call",
            "namespace": "agents",
            "name": "spawn",
            "arguments": '{"n": 1}',
        },
    ),
    (
        "agents__say",
        {"input": "hé"},
        {"type": "custom_tool_call", "namespace": "agents", "name": "say", "input": "hé"},
    ),
    (
        "edit",
        {"input": 'a "b"\n'},
        {"type": "custom_tool_call", "name": "edit", "input": 'a "b"\n'},
    ),
    (
        "shell",
        {"commands": ["ls"], "timeout_ms": 9},
        {
            "type": "shell_call",
            "action": {"commands": ["ls"], "timeout_ms": 9, "max_output_length": None},
            "environment": {"type": "local"},
        },
    ),
    (
        "local_shell",
        {"command": ["ls", "-l"]},
        {
            "type": "local_shell_call",
            "action": {
                "type": "exec",
                "command": ["ls", "-l"],
                "env": {},
                "timeout_ms": None,
                "user": None,
                "working_directory": None,
            },
        },
    ),
    (
        "apply_patch",
        {"type": "delete_file", "path": "a"},
        {"type": "apply_patch_call", "operation": {"type": "delete_file", "path": "a"}},
    ),
    (
        "tool_search",
        {"query": "x"},
        {"type": "tool_search_call", "execution": "client", "arguments": {"query": "x"}},
    ),
]
OUTPUTS: dict[str, Json] = {
    "function_call": {"type": "function_call_output", "output": "1"},
    "custom_tool_call": {
        "type": "custom_tool_call_output",
        "output": [{"type": "input_text", "text": "1"}],
    },
    "shell_call": {
        "type": "shell_call_output",
        "output": [{"stdout": "1", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}],
    },
    "local_shell_call": {"type": "local_shell_call_output", "output": '{"output": "1"}'},
    "apply_patch_call": {"type": "apply_patch_call_output", "status": "failed", "output": "1"},
    "tool_search_call": {"type": "tool_search_output", "tools": [{**FUNCTION, "name": "found"}]},
}
ITEM = TypeAdapter[Any](ResponseOutputItem)


def find_types(union: Any) -> Iterator[str]:
    """The types of the members of one of OpenAI's unions."""
    for member in get_args(union):
        yield from get_args(get_type_hints(member)["type"])


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def test_each_of_openais_tools_is_offered_or_left_out() -> None:
    offered = {str(tool["type"]) for tool in CLIENT_TOOLS}
    assert set(find_types(ToolParam)) == offered | HOSTED_TOOLS & set(find_types(ToolParam))
    assert not offered & HOSTED_TOOLS
    for kind in HOSTED_TOOLS:
        assert not place_tools([{"type": kind}]).offered
    assert not place_tools([CONTAINER, {"type": "tool_search"}]).offered


async def test_a_model_is_offered_functions_whatever_the_tools_are(api, ask) -> None:
    tools = [*CLIENT_TOOLS, {"type": "web_search"}, CONTAINER]
    response = await ask("hello", tools=tools)
    session = await api.catalog.sessions.get(response.headers["kvrecall-session"], "")
    found = [json.loads(tool)["function"] for tool in session.settings.tools]
    functions = {function["name"]: function for function in found}
    assert set(functions) == {name for name, _, _ in CALLS}
    text = functions["edit"]["parameters"]["properties"]["input"]
    assert text == {"type": "string", "x-grammar": 'start: "a" /b+/'}
    given = [tool["type"] for tool in response.json()["tools"]]
    assert given == [tool["type"] for tool in CLIENT_TOOLS]


@pytest.mark.parametrize(("name", "arguments", "expected"), CALLS)
async def test_a_call_is_an_item_of_its_tools_type_and_its_output_goes_on(
    api, ask, get_text, name: str, arguments: Json, expected: Json
) -> None:
    api.worker.script = [[pb.ToolCall(id="c1", name=name, arguments=json.dumps(arguments))], "done"]
    first = await ask("hello", tools=CLIENT_TOOLS)
    (item,) = first.json()["output"]
    assert item == {**expected, "id": item["id"], "call_id": "c1", "status": "completed"}
    ITEM.validate_python(item)
    key = "id" if expected["type"] == "local_shell_call" else "call_id"
    output = {key: "c1", **OUTPUTS[expected["type"]]}
    second = await ask([user("hello"), item, output], tools=CLIENT_TOOLS)
    assert get_text(second.json()) == "done"
    if expected["type"] == "tool_search_call":
        assert second.headers["kvrecall-match"] == "built", "its output brings another tool"
        assert second.json()["tools"][-1]["name"] == "found"
    else:
        assert second.headers["kvrecall-match"] == "continued"
    third = await ask("more", tools=CLIENT_TOOLS, previous_response_id=second.json()["id"])
    page = await api.http.get(
        f"/v1/responses/{third.json()['id']}/input_items", params={"order": "asc"}
    )
    kinds = [each["type"] for each in page.json()["data"]]
    call = expected["type"]
    assert kinds == ["message", call, OUTPUTS[call]["type"], "message", "message"]


@pytest.mark.parametrize(("name", "arguments", "expected"), CALLS)
async def test_the_stream_of_a_call_adds_up_to_its_item(
    api, ask, parse_events, name: str, arguments: Json, expected: Json
) -> None:
    api.worker.script = [[pb.ToolCall(id="c1", name=name, arguments=json.dumps(arguments))]]
    found = parse_events((await ask("hello", tools=CLIENT_TOOLS, stream=True)).text)
    (added,) = [data["item"] for kind, data in found if kind == "response.output_item.added"]
    (done,) = [data["item"] for kind, data in found if kind == "response.output_item.done"]
    assert (added["id"], added["status"]) == (done["id"], "in_progress")
    assert found[-1][1]["response"]["output"] == [done]
    grown = {kind.removeprefix("response."): data for kind, data in found[3:-2]}
    match expected["type"]:
        case "custom_tool_call":
            assert added["input"] == ""
            assert list(grown) == ["custom_tool_call_input.delta", "custom_tool_call_input.done"]
            assert grown["custom_tool_call_input.done"]["input"] == expected["input"]
        case "shell_call":
            assert grown["shell_call_command.done"]["command"] == "ls"
        case "function_call":
            assert grown["function_call_arguments.done"]["name"] == expected["name"]


async def test_a_text_that_a_model_wrote_otherwise_is_passed_on_whole(api, answer) -> None:
    api.worker.script = [[pb.ToolCall(id="c1", name="edit", arguments='{"patch": "a"}')]]
    (item,) = (await answer("hello", tools=[EDIT]))["output"]
    assert item["input"] == '{"patch": "a"}'


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({**EDIT, "format": {**EDIT["format"], "definition": "start: x"}}, ".format.definition"),
        ({**EDIT, "format": {**EDIT["format"], "syntax": "ebnf"}}, ".format"),
        ({**EDIT, "format": {"type": "json"}}, ".format"),
        ({"type": "custom"}, ".name"),
        ({"type": "namespace", "tools": []}, ".name"),
        ({"type": "namespace", "name": "n"}, ".tools"),
        ({**AGENTS, "tools": [{"type": "mcp"}]}, ".tools[0]"),
        ({**AGENTS, "tools": [{"type": "function"}]}, ".tools[0].name"),
        ({**AGENTS, "tools": [{**FUNCTION, "strict": True, "parameters": {"not": {}}}]},
         ".tools[0].parameters"),
    ],
)  # fmt: skip
async def test_a_bad_tool_is_refused_by_its_place(ask, tool: Json, param: str) -> None:
    response = await ask("hello", tools=[{"type": "web_search"}, FUNCTION, tool])
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, f"tools[2]{param}")


CHOICES: list[tuple[Any, str, tuple[str, ...]]] = [
    ("required", "required", ()),
    ({"type": "function", "name": "f"}, "required", ("f",)),
    ({"type": "custom", "name": "edit"}, "required", ("edit",)),
    ({"type": "function", "name": "spawn"}, "required", ("agents__spawn",)),
    ({"type": "shell"}, "required", ("shell",)),
    ({"type": "apply_patch"}, "required", ("apply_patch",)),
    ({"type": "web_search_preview"}, "auto", ()),
    ({"type": "mcp", "server_label": "s", "name": "f"}, "auto", ()),
    ({"type": "programmatic_tool_calling"}, "auto", ()),
    (
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [
                {"type": "custom", "name": "edit"},
                {"type": "namespace", "name": "agents"},
                {"type": "image_generation"},
            ],
        },
        "required",
        ("edit", "agents__spawn", "agents__say"),
    ),
    ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}, "none", ()),
]


@pytest.mark.parametrize(("choice", "mode", "names"), CHOICES)
async def test_a_choice_names_tools_of_all_types(
    turns, ask, choice: Any, mode: str, names: tuple[str, ...]
) -> None:
    response = await ask("hello", tools=CLIENT_TOOLS, tool_choice=choice)
    assert response.status_code == 200, response.text
    assert response.json()["tool_choice"] == choice
    constraint = turns[0].sampling.constraint
    assert (constraint.tool_choice or "auto", tuple(constraint.tools)) == (mode, names)


async def test_where_all_tools_are_left_out_none_can_be_required(ask) -> None:
    response = await ask("hello", tools=[{"type": "web_search"}], tool_choice="required")
    assert response.status_code == 200
    assert response.json()["tools"] == []
