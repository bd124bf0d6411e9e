"""OpenAI's own client against a real model: forms of answers, choice of tools, log-probabilities."""

import json
import math
from typing import Any, Literal

import httpx
import pytest
from openai import BadRequestError, OpenAI
from pydantic import BaseModel, ConfigDict, Field

Json = dict[str, Any]
SETTINGS: Json = {"budget": 256, "research": {"method": "snapkv", "repair_rows": 32}, "seed": 7}


class Place(BaseModel):
    """Nested, so that the schema has definitions."""

    model_config = ConfigDict(extra="forbid")

    name: Literal["locker", "garden", "station"]
    floor: int = Field(ge=0, le=9)


class Found(BaseModel):
    """What the model is asked to fill in."""

    model_config = ConfigDict(extra="forbid")

    place: Place
    sure: bool


def make_tool(name: str, **members: Any) -> Json:
    function = {"name": name, "parameters": Found.model_json_schema(), **members}
    return {"type": "function", "function": function}


TOOLS = [make_tool("look_up", strict=True), make_tool("move")]


def ask(client: OpenAI, messages: list[Any], **options: Any) -> Any:
    (model,) = client.models.list().data
    options = {"temperature": 0, "max_tokens": 300, **options}
    return client.chat.completions.create(
        model=model.id, messages=messages, extra_body={"kvrecall": SETTINGS}, **options
    )


def test_a_pydantic_model_is_parsed_from_the_answer(openai: OpenAI, say: Any) -> None:
    (model,) = openai.models.list().data
    parsed = openai.chat.completions.parse(
        model=model.id,
        messages=[say.user("Where is Ada's badge?")],
        response_format=Found,
        max_tokens=300,
        temperature=1.0,
        seed=3,
        extra_body={"kvrecall": SETTINGS},
    )
    choice = parsed.choices[0]
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Found)


def test_an_object_of_any_form_is_json(openai: OpenAI, say: Any) -> None:
    answer = ask(
        openai,
        [say.user("Where is Ada's badge?")],
        response_format={"type": "json_object"},
        max_tokens=400,
        temperature=1.0,
        seed=1,
    ).choices[0]
    if answer.finish_reason == "stop":
        assert isinstance(json.loads(answer.message.content), dict)
    else:
        assert answer.message.content.startswith("{"), "cut by the limit"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"look_up", "move"}),
        ({"type": "function", "function": {"name": "move"}}, {"move"}),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": "look_up"}}],
                },
            },
            {"look_up"},
        ),
    ],
)
def test_a_call_comes_where_it_has_to(
    choice: Any, names: set[str], stream: bool, openai: OpenAI, say: Any
) -> None:
    options: Json = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    asked = say.user(f"Where is Ada's badge? {sorted(names)} {stream}")
    answer = ask(openai, [asked], stream=stream, **options)
    if stream:
        chunks = [chunk.choices[0] for chunk in answer if chunk.choices]
        reason = chunks[-1].finish_reason
        pieces = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
        called = [piece.function.name for piece in pieces if piece.function.name]
        arguments = "".join(piece.function.arguments for piece in pieces)
    else:
        reason = answer.choices[0].finish_reason
        (call,) = answer.choices[0].message.tool_calls
        called, arguments = [call.function.name], call.function.arguments
    assert reason == "tool_calls"
    assert len(called) == 1
    assert set(called) <= names
    Found.model_validate_json(arguments)


def test_a_call_is_a_pause_and_its_result_goes_on(openai: OpenAI, client: Any, say: Any) -> None:
    messages: list[Any] = [say.user("Where is Ben's badge?")]
    asked = ask(openai, messages, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    (call,) = asked.choices[0].message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "Ben's badge has number 1234."}
    messages += [asked.choices[0].message, result]
    tools: Any = TOOLS
    raw = openai.chat.completions.with_raw_response.create(
        model=openai.models.list().data[0].id,
        messages=messages,
        tools=tools,
        tool_choice="none",
        max_tokens=12,
        temperature=0,
        extra_body={"kvrecall": SETTINGS},
    )
    assert raw.headers["kvrecall-match"] == "continued"
    assert raw.parse().choices[0].message.tool_calls is None
    session = raw.headers["kvrecall-session"]
    assert client.get_session(session).turns == 2


def test_log_probabilities_are_those_of_the_texts_tokens(openai: OpenAI, say: Any) -> None:
    messages = [say.user("Where is Ada's badge? Say it.")]
    options: Json = {"logprobs": True, "top_logprobs": 3, "max_tokens": 8}
    answer = ask(openai, messages, **options).choices[0]
    content = answer.logprobs.content
    said = b"".join(bytes(each.bytes) for each in content)
    assert said.decode().strip() == answer.message.content
    for each in content:
        assert len(each.top_logprobs) == 3
        assert each.logprob == pytest.approx(each.top_logprobs[0].logprob), "greedy"
        assert sum(math.exp(other.logprob) for other in each.top_logprobs) <= 1.001
    chunks = list(ask(openai, messages, stream=True, **options))
    streamed = [
        each
        for chunk in chunks
        if chunk.choices and chunk.choices[0].logprobs
        for each in chunk.choices[0].logprobs.content
    ]
    assert [each.token for each in streamed] == [each.token for each in content]
    plain = ask(openai, messages, max_tokens=8).choices[0]
    assert plain.logprobs is None


def test_penalties_and_biases_change_the_answer(openai: OpenAI, say: Any) -> None:
    messages = [say.user("Where is Ada's badge? Say it twice.")]
    plain = ask(openai, messages, max_tokens=24).choices[0].message.content
    for options in (
        {"frequency_penalty": 2.0},
        {"presence_penalty": 2.0},
        {"logit_bias": {"70": 90}},
    ):
        other = ask(openai, messages, max_tokens=24, **options).choices[0].message.content
        assert other != plain


def test_a_schema_that_cannot_be_followed_is_refused_before_anything_is_begun(
    openai: OpenAI, client: Any, say: Any
) -> None:
    before = len(client.list_sessions().sessions)
    bad = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    form: Any = {
        "type": "json_schema",
        "json_schema": {"name": "odd", "schema": bad, "strict": True},
    }
    with pytest.raises(BadRequestError) as refused:
        ask(openai, [say.user("hello")], response_format=form)
    assert refused.value.param == "response_format"
    assert "not" in refused.value.message
    strict = {"type": "function", "function": {"name": "f", "parameters": bad, "strict": True}}
    with pytest.raises(BadRequestError) as refused:
        ask(openai, [say.user("hello")], tools=[strict])
    assert refused.value.param == "tools[0].function.parameters"
    assert len(client.list_sessions().sessions) == before


def test_a_turn_of_the_session_api_has_the_same_options(client: Any, server: Any, say: Any) -> None:
    session = client.create_session(**SETTINGS).id
    body = {
        "messages": [say.user("Where is Ada's badge?")],
        "max_tokens": 300,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "found", "schema": Found.model_json_schema()},
        },
        "logprobs": {"top": 1},
    }
    turn = httpx.post(f"{server.url}/v1/sessions/{session}/turns", json=body, timeout=60).json()
    assert Found.model_validate_json(turn["message"]["content"])
    assert "".join(each["token"] for each in turn["logprobs"]) == turn["message"]["content"]
    refused = httpx.post(
        f"{server.url}/v1/sessions/{session}/turns",
        json={"messages": [say.user("x")], "tool_choice": "required"},
        timeout=60,
    )
    assert (refused.status_code, refused.json()["field"]) == (422, "tool_choice")
    client.delete_session(session)
