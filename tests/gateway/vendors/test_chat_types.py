"""Chat completions are what OpenAI's own types and client say, plain and streamed."""

from typing import Any

import pytest
from openai import AsyncOpenAI
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types import Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.gateway.vendors.answers import CUSTOM, OPENAIS, SCHEMA, Answer, answer_with
from tests.gateway.vendors.vendor_types import Json, check, read_events

PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello there"}]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {},
                "required": [],
                "additionalProperties": False,
            },
        },
    }
]
GRAMMAR = {"syntax": "lark", "definition": "start: /[^x]*/"}
CUSTOM_TOOL: Json = {
    "type": "custom",
    "custom": {
        "name": CUSTOM,
        "description": "Runs a text.",
        "format": {"type": "grammar", "grammar": GRAMMAR},
    },
}
FORMS: dict[str, Json] = {
    "json_schema": {
        "type": "json_schema",
        "json_schema": {"name": "place", "strict": True, "schema": SCHEMA},
    },
    "json_object": {"type": "json_object"},
}
EVERY = pytest.mark.parametrize("answer", OPENAIS.values(), ids=list(OPENAIS))


def build(api: Any, answer: Answer, **members: Any) -> Json:
    """Build the request whose answer this is."""
    body: Json = {"model": api.service.info.model, "messages": HELLO, **members}
    if answer.calls:
        body["tools"] = TOOLS
    if answer.inputs:
        body["tools"] = [*body.get("tools", ()), CUSTOM_TOOL]
    if answer.inputs and not answer.calls:
        body["tool_choice"] = {"type": "custom", "custom": {"name": CUSTOM}}
    if answer.form:
        body["response_format"] = FORMS[answer.form]
    if answer.logprobs:
        body |= {"logprobs": True, "top_logprobs": 2}
    if answer.stop:
        body["stop"] = [answer.stop]
    return body


async def read_plain(api: Any, answer: Answer, **members: Any) -> ChatCompletion:
    response = await api.http.post(PATH, json=build(api, answer, **members))
    assert response.status_code == 200, response.text
    found: ChatCompletion = check(ChatCompletion, response.json())
    return found


@EVERY
async def test_an_answer_is_a_completion(api: Any, answer: Answer) -> None:
    answer_with(api.worker, answer)
    found = await read_plain(api, answer)
    (choice,) = found.choices
    assert (choice.finish_reason, choice.message.role) == (answer.finish, "assistant")
    called = [*answer.calls, *answer.inputs]
    assert choice.message.content == (answer.text.rstrip() or (None if called else ""))
    calls = choice.message.tool_calls
    assert (calls is None) == (not called)
    assert get_called(calls) == called
    assert (choice.logprobs is not None) == answer.logprobs
    usage = found.usage
    assert usage is not None
    assert usage.completion_tokens == answer.tokens
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details is not None
    assert 0 <= (usage.prompt_tokens_details.cached_tokens or 0) <= usage.prompt_tokens


def get_called(calls: list[Any] | None) -> list[str]:
    """Return what functions and custom tools are called with."""
    return [
        call.function.arguments if call.type == "function" else call.custom.input
        for call in calls or ()
    ]


@EVERY
@pytest.mark.parametrize("count", [1, 2])
async def test_a_stream_is_chunks_that_add_up_to_the_completion(
    api: Any, answer: Answer, count: int
) -> None:
    answer_with(api.worker, answer)
    options = {"stream": True, "stream_options": {"include_usage": True}, "n": count}
    response = await api.http.post(PATH, json=build(api, answer, **options))
    assert response.text.endswith("data: [DONE]\n\n")
    chunks = [check(ChatCompletionChunk, data) for _, data in read_events(response.text)]
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    *pieces, last = chunks
    assert (last.choices, last.usage.completion_tokens) == ([], answer.tokens * count)
    assert all(chunk.usage is None and len(chunk.choices) == 1 for chunk in pieces)
    for number in range(count):
        check_choice([c.choices[0] for c in pieces if c.choices[0].index == number], answer)


@EVERY
@pytest.mark.parametrize("count", [1, 2])
async def test_each_chunk_has_the_counts_so_far_where_they_are_asked_for(
    api: Any, answer: Answer, count: int
) -> None:
    answer_with(api.worker, answer)
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = build(api, answer, stream=True, stream_options=options, n=count)
    read = read_events((await api.http.post(PATH, json=body)).text)
    *pieces, last = [check(ChatCompletionChunk, data) for _, data in read]
    for number in range(count):
        usages = [chunk.usage for chunk in pieces if chunk.choices[0].index == number]
        known = [usage for usage in usages if usage is not None]
        assert known[-1].completion_tokens == answer.tokens
        made = [usage.completion_tokens for usage in known]
        assert made == sorted(made)
        spoken = answer.text or answer.reasoning or answer.calls + answer.inputs
        assert any(made[:-1]) == bool(spoken)
        assert {usage.prompt_tokens for usage in known} == {last.usage.prompt_tokens}
        assert all(u.total_tokens == u.prompt_tokens + u.completion_tokens for u in known)
        assert count > 1 or known == usages
    assert last.usage.completion_tokens == answer.tokens * count


def check_choice(choices: list[Any], answer: Answer) -> None:
    """Check the chunks of one answer: their order, and what they add up to."""
    first, *rest, end = choices
    assert (first.delta.role, first.delta.content) == ("assistant", "")
    assert (end.finish_reason, end.delta.model_dump(exclude_none=True)) == (answer.finish, {})
    assert all(choice.finish_reason is None for choice in (first, *rest))
    assert all(choice.delta.model_dump(exclude_none=True) for choice in rest), "none is empty"
    assert all(choice.delta.role is None for choice in rest)
    assert (
        "".join(choice.delta.content or "" for choice in choices).rstrip() == answer.text.rstrip()
    )
    deltas = [call for choice in rest for call in choice.delta.tool_calls or ()]
    for index, arguments in enumerate(answer.calls):
        head, *pieces = [call for call in deltas if call.index == index]
        assert (head.id, head.type, head.function.name) == (f"call_9_{index}", "function", "f")
        assert head.function.arguments == ""
        assert {(call.id, call.type, call.function.name) for call in pieces} <= {(None,) * 3}
        assert "".join(call.function.arguments for call in pieces) == arguments
        assert all(call.function.arguments for call in pieces)
    for index, text in enumerate(answer.inputs, len(answer.calls)):
        head, *pieces = [call for call in deltas if call.index == index]
        assert (head.id, head.type) == (f"call_9_{index}", "custom")
        assert head.custom == {"name": CUSTOM, "input": ""}
        assert {(call.id, call.type) for call in pieces} <= {(None, None)}
        assert all(call.custom.keys() == {"input"} and call.custom["input"] for call in pieces)
        assert "".join(call.custom["input"] for call in pieces) == text
    assert [call.index for call in deltas] == sorted(call.index for call in deltas)


@EVERY
async def test_openais_client_puts_a_stream_together_to_the_same_completion(
    api: Any, answer: Answer, openai: AsyncOpenAI
) -> None:
    answer_with(api.worker, answer)
    plain = (await read_plain(api, answer)).choices[0]
    body = build(api, answer, stream_options={"include_usage": True})
    chunks = await openai.chat.completions.create(**body, stream=True)
    if answer.finish == "length":  # its accumulator raises an error there
        assert [chunk async for chunk in chunks][-2].choices[0].finish_reason == "length"
        return
    if answer.inputs:  # its parser takes calls of functions alone, its accumulator takes all
        state: Any = ChatCompletionStreamState()
        async for chunk in chunks:
            state.handle_chunk(chunk)
        final = state.current_completion_snapshot
    else:
        async with openai.chat.completions.stream(**body) as stream:
            final = await stream.get_final_completion()
    choice = final.choices[0]
    assert choice.finish_reason == plain.finish_reason
    assert (choice.message.content or "").rstrip() == (plain.message.content or "")
    made: list[Any] = list(choice.message.tool_calls or ())
    assert [call.id for call in made] == [call.id for call in plain.message.tool_calls or ()]
    functions = [call for call in made if call.type == "function"]
    assert [call.function.arguments for call in functions] == list(answer.calls)
    custom = [call for call in made if call.type == "custom"]
    assert [call.custom["input"] for call in custom] == list(answer.inputs)
    assert final.usage is not None
    assert final.usage.completion_tokens == answer.tokens


SINGLE = {
    name: answer
    for name, answer in OPENAIS.items()
    if not answer.inputs and len(answer.calls) < 2 and not answer.form
}


def build_single(api: Any, answer: Answer, **members: Any) -> Json:
    """Build the request with `functions` whose answer this is."""
    body = build(api, answer, **members)
    body.pop("tools", None)
    return {**body, "functions": [TOOLS[0]["function"]], "function_call": {"name": "f"}}


@pytest.mark.parametrize("answer", SINGLE.values(), ids=list(SINGLE))
async def test_an_answer_to_functions_has_one_function_call(
    api: Any, answer: Answer, openai: AsyncOpenAI
) -> None:
    answer_with(api.worker, answer)
    response = await api.http.post(PATH, json=build_single(api, answer))
    assert response.status_code == 200, response.text
    (choice,) = check(ChatCompletion, response.json()).choices
    finish = "function_call" if answer.calls else answer.finish
    assert choice.finish_reason == finish
    assert choice.message.tool_calls is None
    call = choice.message.function_call
    assert [call.arguments for call in (call,) if call] == list(answer.calls)
    streamed = await api.http.post(PATH, json=build_single(api, answer, stream=True))
    chunks = [check(ChatCompletionChunk, data) for _, data in read_events(streamed.text)]
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert all(delta.tool_calls is None for delta in deltas)
    pieces = [delta.function_call for delta in deltas if delta.function_call is not None]
    names = [piece.name for piece in pieces]
    assert names == (["f", *[None] * (len(pieces) - 1)] if answer.calls else [])
    assert "".join(piece.arguments for piece in pieces) == "".join(answer.calls)
    assert chunks[-1].choices[0].finish_reason == finish
    state: Any = ChatCompletionStreamState()
    async for chunk in await openai.chat.completions.create(
        **build_single(api, answer), stream=True
    ):
        state.handle_chunk(chunk)
    message = state.current_completion_snapshot.choices[0].message
    assert message.function_call == choice.message.function_call


async def test_models_are_openais(api: Any, openai: AsyncOpenAI) -> None:
    listed = (await api.http.get("/v1/models")).json()
    assert listed["object"] == "list"
    assert [model.id async for model in openai.models.list()] == [m["id"] for m in listed["data"]]
    for model in listed["data"]:
        known = {name: model[name] for name in Model.model_fields if name in model}
        check(Model, known)
