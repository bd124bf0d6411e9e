"""Custom tools and functions of chat completions: what a model is offered, and what goes on behind a call."""

import json
from typing import Any

import httpx
import pytest

from kvrecall.domain.limits import ServiceLimits
from kvrecall.protocol.v1 import worker_pb2 as pb

Json = dict[str, Any]
PATH = "/v1/chat/completions"
HELLO: list[Json] = [{"role": "user", "content": "hello there"}]
FUNCTION: Json = {"name": "f", "parameters": {"type": "object"}}
TOOL: Json = {"type": "function", "function": FUNCTION}


def custom(**members: Any) -> Json:
    return {"type": "custom", "custom": {"name": "edit", **members}}


def grammar(syntax: str, definition: str) -> Json:
    return {
        "type": "grammar",
        "grammar": {"syntax": syntax, "definition": definition},
    }


async def ask(api: Any, messages: list[Json], **body: Any) -> httpx.Response:
    model = api.service.info.model
    answer: httpx.Response = await api.http.post(
        PATH, json={"model": model, "messages": messages, **body}
    )
    return answer


async def read_tools(api: Any, response: httpx.Response) -> list[Json]:
    """Read the functions that the session's model is offered."""
    assert response.status_code == 200, response.text
    session = await api.catalog.sessions.get(response.headers["kvrecall-session"], "")
    return [json.loads(tool)["function"] for tool in session.settings.tools]


@pytest.fixture
def constraints(api: Any) -> list[pb.Constraint]:
    """The constraints on the answers that the worker is asked for."""
    seen: list[pb.Constraint] = []
    worker_turn = api.worker.turn

    def record_turn(request: pb.TurnRequest) -> Any:
        seen.append(request.sampling.constraint)
        return worker_turn(request)

    api.worker.turn = record_turn
    return seen


@pytest.mark.parametrize(
    ("members", "text"),
    [
        ({}, {"type": "string"}),
        ({"format": {"type": "text"}}, {"type": "string"}),
        (
            {"format": grammar("lark", 'start: "a" /b+/')},
            {"type": "string", "x-grammar": 'start: "a" /b+/'},
        ),
        ({"format": grammar("regex", "ab+")}, {"type": "string", "x-grammar": "start: /ab+/"}),
    ],
)
async def test_a_custom_tool_is_a_function_with_a_text(api, members: Json, text: Json) -> None:
    response = await ask(api, HELLO, tools=[TOOL, custom(description="Edits.", **members)])
    plain, edit = await read_tools(api, response)
    assert plain == FUNCTION
    assert (edit["name"], edit["description"]) == ("edit", "Edits.")
    assert edit["parameters"]["properties"] == {"input": text}


@pytest.mark.parametrize(
    ("choice", "mode", "names"),
    [
        ({"type": "custom", "custom": {"name": "edit"}}, "required", ["edit"]),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "custom", "custom": {"name": "edit"}}, TOOL],
                },
            },
            "required",
            ["edit", "f"],
        ),
    ],
)
async def test_a_choice_names_custom_tools(
    api, constraints, choice: Json, mode: str, names: list[str]
) -> None:
    response = await ask(api, HELLO, tools=[TOOL, custom()], tool_choice=choice)
    assert response.status_code == 200, response.text
    (constraint,) = constraints
    assert (constraint.tool_choice, list(constraint.tools)) == (mode, names)


async def test_the_result_of_a_custom_tools_call_goes_on_in_its_session(api) -> None:
    text = 'a "b"\n\\'
    call = pb.ToolCall(id="c1", name="edit", arguments=json.dumps({"input": text}))
    api.worker.script = [[call], "done"]
    first = await ask(api, HELLO, tools=[custom()])
    message = first.json()["choices"][0]["message"]
    assert message["tool_calls"] == [
        {"id": "c1", "type": "custom", "custom": {"name": "edit", "input": text}}
    ]
    result = {"role": "tool", "tool_call_id": "c1", "content": "1"}
    second = await ask(api, [*HELLO, message, result], tools=[custom()])
    assert second.headers["kvrecall-match"] == "continued"
    assert "kvrecall-ignored" not in second.headers
    assert second.json()["choices"][0]["message"]["content"] == "done"


async def test_functions_are_the_tools_of_the_same_session(api, constraints) -> None:
    call = pb.ToolCall(id="c1", name="f", arguments='{"n": 1}')
    api.worker.script = [[call], "done"]
    first = await ask(api, HELLO, functions=[FUNCTION], function_call={"name": "f"})
    assert await read_tools(api, first) == [FUNCTION]
    message = first.json()["choices"][0]["message"]
    assert message["function_call"] == {"name": "f", "arguments": '{"n": 1}'}
    result = {"role": "tool", "tool_call_id": "c1", "content": "1"}
    called = {"id": "c1", "type": "function", "function": message["function_call"]}
    said = [*HELLO, {"role": "assistant", "tool_calls": [called]}, result]
    second = await ask(api, said, tools=[TOOL], tool_choice="none")
    assert second.headers["kvrecall-match"] == "continued"
    modes = [(each.tool_choice, list(each.tools), each.single_call) for each in constraints]
    assert modes == [("required", ["f"], True), ("none", [], False)]


@pytest.mark.parametrize("choice", [None, "auto", "none"])
async def test_a_choice_of_functions_is_one_of_tools(api, constraints, choice: str | None) -> None:
    await ask(api, HELLO, functions=[FUNCTION], function_call=choice)
    (constraint,) = constraints
    assert (constraint.tool_choice or "auto", constraint.single_call) == (choice or "auto", True)


@pytest.mark.parametrize("damaged", ["repair", "refuse"])
class TestHistories:
    """Histories with `function_call`, where damaged ones are repaired and where they are refused."""

    @pytest.fixture
    def service_settings(self, damaged: str) -> ServiceLimits:
        return ServiceLimits(damaged_history="repair" if damaged == "repair" else "refuse")

    async def test_a_function_message_is_the_result_of_the_call_before_it(self, api) -> None:
        calls = [pb.ToolCall(id=f"c{n}", name="f", arguments=f'{{"n": {n}}}') for n in range(2)]
        api.worker.script = [[calls[0]], [calls[1]], "done"]
        said = list(HELLO)
        for number in range(2):
            answer = await ask(api, said, functions=[FUNCTION])
            message = answer.json()["choices"][0]["message"]
            said += [message, {"role": "function", "name": "f", "content": str(number)}]
        last = await ask(api, said, functions=[FUNCTION])
        assert last.headers["kvrecall-match"] == "continued"
        assert "kvrecall-ignored" not in last.headers
        assert last.json()["choices"][0]["message"]["content"] == "done"

    async def test_one_that_no_session_holds_is_built(self, api) -> None:
        said = list(HELLO)
        for number in range(2):
            call = {"name": "f", "arguments": f'{{"n": {number}}}'}
            asked = {"role": "assistant", "content": None, "function_call": call}
            said += [asked, {"role": "function", "name": "f", "content": str(number)}]
        answer = await ask(api, said, functions=[FUNCTION])
        assert answer.status_code == 200, answer.text
        assert answer.headers["kvrecall-match"] == "built"
        assert "kvrecall-ignored" not in answer.headers


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "custom"}]}, "tools[0].custom"),
        ({"tools": [{"type": "robot"}]}, "tools[0].type"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].custom.name"),
        ({"tools": [custom(format={"type": "json"})]}, "tools[0].custom.format"),
        ({"tools": [custom(format={"type": "grammar"})]}, "tools[0].custom.format"),
        (
            {"tools": [TOOL, custom(format=grammar("lark", "start: x"))]},
            "tools[1].custom.format.grammar.definition",
        ),
        (
            {"tools": [custom()], "tool_choice": {"type": "custom", "custom": {"name": "f"}}},
            "tool_choice",
        ),
        ({"functions": [FUNCTION], "tools": [TOOL]}, "functions"),
        ({"functions": [FUNCTION], "tool_choice": "auto"}, "functions"),
        ({"functions": [{}]}, "functions[0].name"),
        ({"functions": [FUNCTION], "function_call": {"name": "g"}}, "function_call"),
        ({"functions": [FUNCTION], "function_call": "required"}, "function_call"),
        ({"function_call": {"name": "f"}}, "function_call"),
        (
            {"functions": [{**FUNCTION, "strict": True, "parameters": {"not": {}}}]},
            "functions[0].parameters",
        ),
        (
            {"messages": [*HELLO, {"role": "assistant", "tool_calls": [{"id": "c1"}]}]},
            "messages[1].tool_calls[0].function",
        ),
    ],
)
async def test_what_is_no_tool_is_refused_by_its_place(api, body: Json, param: str) -> None:
    response = await ask(api, **{"messages": HELLO, **body})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert await api.catalog.sessions.get_ids() == []
