"""Responses and their events are what OpenAI's own types and client say."""

import asyncio
from typing import Any

import pytest
from openai import AsyncOpenAI
from openai.types.conversations import Conversation
from openai.types.responses import Response, ResponseStreamEvent

from kvrecall.domain.errors import WorkerLost
from tests.gateway.vendors.answers import ANSWERS, CUSTOM, OPENAIS, SCHEMA, Answer, answer_with
from tests.gateway.vendors.vendor_types import Json, check, read_events

PATH = "/v1/responses"
TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "f",
        "description": "Looks something up.",
        "strict": False,
        "parameters": {"type": "object"},
    }
]
CUSTOM_TOOL: Json = {
    "type": "custom",
    "name": CUSTOM,
    "description": "Runs a text.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /[^x]*/"},
}
FORMS: dict[str, Json] = {
    "json_schema": {"type": "json_schema", "name": "place", "strict": True, "schema": SCHEMA},
    "json_object": {"type": "json_object"},
}
EVERY = pytest.mark.parametrize("answer", OPENAIS.values(), ids=list(OPENAIS))
# Events between an item's beginning and its end, in order; the second of each comes in pieces.
WITHIN = {
    "message": ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"],
    "reasoning": ["", "reasoning_text.delta", "reasoning_text.done", ""],
    "function_call": [
        "",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "",
    ],
    "custom_tool_call": [
        "",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "",
    ],
}


def build(api: Any, answer: Answer, **members: Any) -> Json:
    """Build the request whose answer this is."""
    asked = {"model": api.service.info.model, "input": "hello there"}
    return {**asked, **build_members(answer), **members}


def build_members(answer: Answer) -> Json:
    """Build the members of a request that ask for what the answer has."""
    body: Json = {}
    if answer.calls:
        body["tools"] = TOOLS
    if answer.inputs:
        body["tools"] = [*body.get("tools", ()), CUSTOM_TOOL]
    if answer.inputs and not answer.calls:
        body["tool_choice"] = {"type": "custom", "name": CUSTOM}
    if answer.form:
        body["text"] = {"format": FORMS[answer.form]}
    if answer.logprobs:
        body |= {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    return body


async def read_plain(api: Any, answer: Answer, **members: Any) -> Response:
    response = await api.http.post(PATH, json=build(api, answer, **members))
    assert response.status_code == 200, response.text
    found: Response = check(Response, response.json())
    return found


def check_response(response: Response, answer: Answer) -> None:
    """Check an ended response: its status, its items, its usage."""
    cut = answer.finish == "length"
    assert response.id.startswith("resp_")
    assert response.status == ("incomplete" if cut else "completed")
    details = response.incomplete_details
    assert (details and details.reason) == ("max_output_tokens" if cut else None)
    assert (response.completed_at is None) == cut
    assert response.error is None
    assert response.output_text == answer.text.rstrip()
    prefixes = {
        "message": "msg_",
        "reasoning": "rs_",
        "function_call": "fc_",
        "custom_tool_call": "ctc_",
    }
    ids = [str(item.id) for item in response.output]
    assert len(set(ids)) == len(ids)
    for item in response.output:
        assert str(item.id).startswith(prefixes[item.type])
    check_form(response, answer)
    kinds = ("function_call", "custom_tool_call")
    calls: list[Any] = [item for item in response.output if item.type in kinds]
    assert get_called(calls) == [*answer.calls, *answer.inputs]
    assert [call.status for call in calls] == [
        "incomplete" if cut and index == len(calls) - 1 else "completed"
        for index in range(len(calls))
    ]
    usage = response.usage
    assert usage is not None
    assert usage.output_tokens == answer.tokens
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert 0 <= usage.input_tokens_details.cached_tokens <= usage.input_tokens
    assert (usage.output_tokens_details.reasoning_tokens > 0) == bool(answer.reasoning)


def check_form(response: Response, answer: Answer) -> None:
    """Check that the response gives back the tools, their choice and the form of the text."""
    asked = build_members(answer)
    tools = [tool.model_dump(exclude_unset=True) for tool in response.tools]
    assert tools == asked.get("tools", [])
    choice = response.tool_choice
    given = choice if isinstance(choice, str) else choice.model_dump(exclude_unset=True)
    assert given == asked.get("tool_choice", "auto")
    assert response.text is not None
    assert response.text.format is not None
    form = response.text.format.model_dump(by_alias=True, exclude_unset=True)
    assert form == FORMS.get(answer.form, {"type": "text"})


def get_called(items: list[Any]) -> list[str]:
    """Return what functions and custom tools are called with."""
    return [
        item.arguments if item.type == "function_call" else item.input
        for item in items
        if item.type in ("function_call", "custom_tool_call")
    ]


@EVERY
async def test_an_answer_is_a_response(api: Any, answer: Answer) -> None:
    answer_with(api.worker, answer)
    found = await read_plain(api, answer)
    check_response(found, answer)
    again = check(Response, (await api.http.get(f"{PATH}/{found.id}")).json())
    assert again == found


@EVERY
async def test_a_stream_is_events_in_order_that_add_up_to_the_response(
    api: Any, answer: Answer
) -> None:
    answer_with(api.worker, answer)
    response = await api.http.post(PATH, json=build(api, answer, stream=True))
    read = read_events(response.text)
    assert all(name == data["type"] for name, data in read)
    events = [check(ResponseStreamEvent, data) for _, data in read]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    created, in_progress, *within, ended = events
    assert (created.type, in_progress.type) == ("response.created", "response.in_progress")
    for event in (created, in_progress):
        head = event.response
        assert (head.status, head.output, head.usage) == ("in_progress", [], None)
        assert head.id == ended.response.id
    assert ended.type == f"response.{ended.response.status}"
    check_response(ended.response, answer)
    for index, item in enumerate(ended.response.output):
        check_item([event for event in within if event.output_index == index], item)
    assert [event.output_index for event in within] == sorted(e.output_index for e in within)


def check_item(events: list[Any], item: Any) -> None:
    """Check the events of one item: their order, the item's id, and what they add up to."""
    added, *within, done = events
    kinds = [event.type.removeprefix("response.") for event in within]
    merged = [kind for kind, before in zip(kinds, ["", *kinds], strict=False) if kind != before]
    wanted = [kind for kind in WITHIN[item.type] if kind]
    assert [kind for kind in wanted if kind in merged] == merged
    assert set(wanted) - set(merged) <= {WITHIN[item.type][1]}, "only an empty text has no piece"
    assert (added.type, done.type) == ("response.output_item.added", "response.output_item.done")
    assert done.item == item
    assert (added.item.id, added.item.type) == (item.id, item.type)
    assert added.item.status == "in_progress"
    assert {event.item_id for event in within} == {item.id}
    text = "".join(event.delta for event in within if event.type.endswith(".delta"))
    if item.type == "function_call":
        assert (added.item.arguments, text) == ("", item.arguments)
        assert (added.item.call_id, added.item.name) == (item.call_id, item.name)
        (whole,) = [event for event in within if event.type.endswith("arguments.done")]
        assert (whole.arguments, whole.name) == (item.arguments, item.name)
    elif item.type == "custom_tool_call":
        assert (added.item.input, text) == ("", item.input)
        assert (added.item.call_id, added.item.name) == (item.call_id, item.name)
        (whole,) = [event for event in within if event.type.endswith("input.done")]
        assert whole.input == item.input
    else:
        assert added.item.content == []
        assert text == item.content[0].text


@EVERY
async def test_openais_client_puts_a_stream_together_to_the_same_response(
    api: Any, answer: Answer, openai: AsyncOpenAI
) -> None:
    answer_with(api.worker, answer)
    async with openai.responses.stream(**build(api, answer)) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response() if "response.completed" in kinds else None
    if answer.finish == "length":
        assert kinds[-1] == "response.incomplete"
        return
    assert final is not None
    plain = await read_plain(api, answer)
    assert final.output_text == plain.output_text
    assert [item.type for item in final.output] == [item.type for item in plain.output]
    assert get_called(final.output) == [*answer.calls, *answer.inputs]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_in_the_background_begins_as_queued(api: Any, stream: bool) -> None:
    answer = ANSWERS["call after text"]
    answer_with(api.worker, answer)
    body = build(api, answer, background=True, stream=stream)
    response = await api.http.post(PATH, json=body)
    if stream:
        events = [check(ResponseStreamEvent, data) for _, data in read_events(response.text)]
        assert [event.type for event in events[:3]] == [
            "response.created",
            "response.queued",
            "response.in_progress",
        ]
        statuses = [event.response.status for event in events[:3]]
        assert statuses == ["queued", "queued", "in_progress"]
        ended = events[-1].response
    else:
        begun = check(Response, response.json())
        assert (begun.status, begun.background, begun.output) == ("queued", True, [])
        ended = begun
        while ended.status in ("queued", "in_progress"):
            ended = check(Response, (await api.http.get(f"{PATH}/{begun.id}")).json())
    check_response(ended, answer)


async def test_a_response_that_was_cancelled_is_one(api: Any, openai: AsyncOpenAI) -> None:
    api.worker.script = ["one two"]
    api.worker.gates["token"] = asyncio.Event()
    begun = await openai.responses.create(
        model=api.service.info.model, input="hello", background=True
    )
    cancelled = (await api.http.post(f"{PATH}/{begun.id}/cancel")).json()
    assert check(Response, cancelled).status == "cancelled"
    assert check(Response, (await api.http.get(f"{PATH}/{begun.id}")).json()).status == "cancelled"


async def test_a_failure_within_a_stream_is_a_failed_response(api: Any) -> None:
    api.worker.faults["done"] = WorkerLost("gone")
    body = {"model": api.service.info.model, "input": "hello", "stream": True}
    text = (await api.http.post(PATH, json=body)).text
    events = [check(ResponseStreamEvent, data) for _, data in read_events(text)]
    failed = events[-1].response
    assert (events[-1].type, failed.status, failed.error.code) == (
        "response.failed",
        "failed",
        "server_error",
    )


async def test_a_conversation_and_its_items_are_openais(api: Any, openai: AsyncOpenAI) -> None:
    answer = ANSWERS["parallel calls"]
    answer_with(api.worker, answer)
    created = (await api.http.post("/v1/conversations", json={"metadata": {"a": "b"}})).json()
    conversation = check(Conversation, created)
    assert conversation.id.startswith("conv_")
    found = await read_plain(api, answer, conversation=conversation.id)
    assert found.conversation is not None
    assert found.conversation.id == conversation.id
    items = [item async for item in openai.conversations.items.list(conversation.id)]
    assert [item.type for item in items] == ["function_call"] * 3 + ["message"] * 2
