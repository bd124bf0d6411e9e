"""Chat completions are what OpenAI's own types and client say, plain and streamed."""

from typing import Any

import pytest
from openai import AsyncOpenAI
from openai.types import Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.gateway.vendors.answers import ANSWERS, Answer, answer_with
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
EVERY = pytest.mark.parametrize("answer", ANSWERS.values(), ids=list(ANSWERS))


def build(api: Any, answer: Answer, **members: Any) -> Json:
    """Build the request whose answer this is."""
    body: Json = {"model": api.service.info.model, "messages": HELLO, **members}
    if answer.calls:
        body["tools"] = TOOLS
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
    assert choice.message.content == (answer.text.strip() or (None if answer.calls else ""))
    calls = choice.message.tool_calls
    assert (calls is None) == (not answer.calls)
    made = [call.function.arguments for call in calls or [] if call.type == "function"]
    assert made == list(answer.calls)
    assert (choice.logprobs is not None) == answer.logprobs
    usage = found.usage
    assert usage is not None
    assert usage.completion_tokens == answer.tokens
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details is not None
    assert 0 <= (usage.prompt_tokens_details.cached_tokens or 0) <= usage.prompt_tokens


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


def check_choice(choices: list[Any], answer: Answer) -> None:
    """Check the chunks of one answer: their order, and what they add up to."""
    first, *rest, end = choices
    assert (first.delta.role, first.delta.content) == ("assistant", "")
    assert (end.finish_reason, end.delta.model_dump(exclude_none=True)) == (answer.finish, {})
    assert all(choice.finish_reason is None for choice in (first, *rest))
    assert all(choice.delta.model_dump(exclude_none=True) for choice in rest), "none is empty"
    assert all(choice.delta.role is None for choice in rest)
    assert "".join(choice.delta.content or "" for choice in choices).strip() == answer.text.strip()
    deltas = [call for choice in rest for call in choice.delta.tool_calls or ()]
    for index, arguments in enumerate(answer.calls):
        head, *pieces = [call for call in deltas if call.index == index]
        assert (head.id, head.type, head.function.name) == (f"call_9_{index}", "function", "f")
        assert head.function.arguments == ""
        assert {(call.id, call.type, call.function.name) for call in pieces} <= {(None,) * 3}
        assert "".join(call.function.arguments for call in pieces) == arguments
        assert all(call.function.arguments for call in pieces)
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
    async with openai.chat.completions.stream(**body) as stream:
        final = await stream.get_final_completion()
    choice = final.choices[0]
    assert choice.finish_reason == plain.finish_reason
    assert (choice.message.content or "").strip() == (plain.message.content or "")
    made = [(c.id, c.function.name, c.function.arguments) for c in choice.message.tool_calls or []]
    assert made == [
        (call.id, call.function.name, call.function.arguments)
        for call in plain.message.tool_calls or []
        if call.type == "function"
    ]
    assert final.usage is not None
    assert final.usage.completion_tokens == answer.tokens


async def test_models_are_openais(api: Any, openai: AsyncOpenAI) -> None:
    listed = (await api.http.get("/v1/models")).json()
    assert listed["object"] == "list"
    assert [model.id async for model in openai.models.list()] == [m["id"] for m in listed["data"]]
    for model in listed["data"]:
        known = {name: model[name] for name in Model.model_fields if name in model}
        check(Model, known)
