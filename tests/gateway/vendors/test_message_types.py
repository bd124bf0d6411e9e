"""Messages and their events are what Anthropic's own types and clients say."""

from typing import Any

import pytest
from anthropic import AsyncAnthropic
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from anthropic.types.beta import BetaMessage, BetaRawMessageStreamEvent
from pydantic_core import from_json

from kvrecall.domain.errors import WorkerLost
from tests.gateway.vendors.answers import ANSWERS, SCHEMA, Answer, answer_with
from tests.gateway.vendors.vendor_types import Json, check, read_events

PATH = "/v1/messages"
TOOLS: list[Any] = [{"name": "f", "input_schema": {"type": "object"}}]
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
EVERY = pytest.mark.parametrize("answer", ANSWERS.values(), ids=list(ANSWERS))


def build(api: Any, answer: Answer, **members: Any) -> Json:
    """Build the request whose answer this is."""
    body: Json = {
        "model": api.service.info.model,
        "max_tokens": 50,
        "messages": [{"role": "user", "content": "hello there"}],
        **members,
    }
    if answer.calls:
        body["tools"] = TOOLS
    if answer.form:
        body["output_config"] = {"format": {"type": answer.form, "schema": SCHEMA}}
    if answer.stop:
        body["stop_sequences"] = [answer.stop]
    return body


def check_message(message: Any, answer: Answer) -> None:
    """Check a whole message: its blocks, its end, its counts."""
    assert message.id.startswith("msg_")
    texts = [block.text for block in message.content if block.type == "text"]
    assert texts == ([answer.text.rstrip()] if answer.text.rstrip() else [])
    thoughts = [block.thinking for block in message.content if block.type == "thinking"]
    assert thoughts == ([answer.reasoning] if answer.reasoning else [])
    calls = [block for block in message.content if block.type == "tool_use"]
    assert [call.input for call in calls] == [
        from_json(text, allow_partial=True) for text in answer.calls
    ]
    assert len({call.id for call in calls}) == len(calls)
    reason = "stop_sequence" if answer.stop else STOP_REASONS[answer.finish]
    assert (message.stop_reason, message.stop_sequence) == (reason, answer.stop or None)
    usage = message.usage
    assert usage.output_tokens == answer.tokens
    assert usage.input_tokens + usage.cache_read_input_tokens > 0


@EVERY
@pytest.mark.parametrize("kind", [Message, BetaMessage])
async def test_an_answer_is_a_message(api: Any, answer: Answer, kind: Any) -> None:
    answer_with(api.worker, answer)
    response = await api.http.post(PATH, json=build(api, answer))
    assert response.status_code == 200, response.text
    check_message(check(kind, response.json()), answer)


@EVERY
@pytest.mark.parametrize("kind", [RawMessageStreamEvent, BetaRawMessageStreamEvent])
async def test_a_stream_is_events_in_order(api: Any, answer: Answer, kind: Any) -> None:
    answer_with(api.worker, answer)
    response = await api.http.post(PATH, json=build(api, answer, stream=True))
    read = read_events(response.text)
    assert all(name == data["type"] for name, data in read)
    events = [check(kind, data) for name, data in read if name != "ping"]
    assert next(data for name, data in read if name == "ping") == {"type": "ping"}
    start, *within, delta, stop = events
    assert (start.type, delta.type, stop.type) == ("message_start", "message_delta", "message_stop")
    begun = start.message
    assert (begun.content, begun.stop_reason, begun.stop_sequence) == ([], None, None)
    assert begun.usage.output_tokens <= 1
    asked = [
        usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
        for usage in (begun.usage, delta.usage)
    ]
    assert asked[0] == asked[1] > 0, "the prompt is counted before the answer begins"
    assert delta.usage.output_tokens == answer.tokens
    blocks = sorted({event.index for event in within})
    assert blocks == list(range(len(blocks)))
    assert [event.index for event in within] == sorted(event.index for event in within)
    for index in blocks:
        check_block([event for event in within if event.index == index])


def check_block(events: list[Any]) -> None:
    """Check the events of one block: it begins empty, grows by its kind of deltas, and stops."""
    start, *deltas, stop = events
    assert (start.type, stop.type) == ("content_block_start", "content_block_stop")
    assert {event.type for event in deltas} == {"content_block_delta"}
    block = start.content_block
    kinds = [event.delta.type for event in deltas]
    match block.type:
        case "text":
            assert (block.text, set(kinds)) == ("", {"text_delta"})
            text = "".join(event.delta.text for event in deltas)
            assert text == text.rstrip() != ""
        case "thinking":
            assert (block.thinking, block.signature) == ("", "")
            assert set(kinds[:-1]) == {"thinking_delta"}
            assert kinds[-1] == "signature_delta"
        case "tool_use":
            assert (block.input, set(kinds)) == ({}, {"input_json_delta"})
            assert deltas[0].delta.partial_json == ""
            written = "".join(event.delta.partial_json for event in deltas)
            assert isinstance(from_json(written, allow_partial=True), dict)


@EVERY
@pytest.mark.parametrize("beta", [False, True])
async def test_anthropics_client_puts_a_stream_together_to_the_same_message(
    served: Any, answer: Answer, beta: bool, anthropic: AsyncAnthropic
) -> None:
    answer_with(served.worker, answer)
    messages: Any = anthropic.beta.messages if beta else anthropic.messages
    body = build(served, answer)
    plain = await messages.create(**body)
    async with messages.stream(**body) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        final = await stream.get_final_message()
    check_message(final, answer)
    assert text == answer.text.rstrip()
    assert [block.model_dump() for block in final.content] == [
        block.model_dump() for block in plain.content
    ]
    assert (final.stop_reason, final.usage.output_tokens) == (
        plain.stop_reason,
        plain.usage.output_tokens,
    )
    both = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    asked = [sum(getattr(m.usage, name) for name in both) for m in (plain, final)]
    assert asked[0] == asked[1], "all counts of the prompt add up to it"


async def test_a_failure_is_anthropics_error_before_a_stream_and_within(api: Any) -> None:
    refused = await api.http.post(PATH, json=build(api, Answer(), model="other", stream=True))
    assert refused.status_code == 404
    check_error(refused.json(), "not_found_error")
    assert refused.json()["request_id"] == refused.headers["request-id"]
    api.worker.faults["done"] = WorkerLost("gone")
    text = (await api.http.post(PATH, json=build(api, Answer(), stream=True))).text
    name, data = read_events(text)[-1]
    assert name == "error"
    check_error(data, "overloaded_error")


def check_error(body: Json, kind: str) -> None:
    assert body["type"] == "error"
    assert body["error"]["type"] == kind
    assert isinstance(body["error"]["message"], str)


async def test_tokens_are_counted_as_anthropic_does(served: Any, anthropic: AsyncAnthropic) -> None:
    body = build(served, ANSWERS["call"])
    del body["max_tokens"]
    counted = (await served.http.post(f"{PATH}/count_tokens", json=body)).json()
    assert check(MessageTokensCount, counted).input_tokens > 0
    assert (await anthropic.messages.count_tokens(**body)).input_tokens == counted["input_tokens"]
    beta = await anthropic.beta.messages.count_tokens(**body)
    assert beta.input_tokens == counted["input_tokens"]
