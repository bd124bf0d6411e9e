"""Streamed responses: every event in its order, and the same response as a plain one."""

import asyncio
import json
from typing import Any

import pytest

from gateway.openai.responses.events import ResponseEvents
from gateway.openai.responses.ids import TurnName
from gateway.openai.responses.objects import build_head
from gateway.openai.responses.schemas import ResponseBody
from kvrecall.domain.errors import CatalogError, WorkerLost
from kvrecall.domain.messages import Message, Sampling, ToolCall
from kvrecall.domain.reports import MemoryReport, TurnOutcome
from kvrecall.protocol.v1 import worker_pb2 as pb
from services.streams.turn import TextDelta, ToolCallEmitted

Json = dict[str, Any]
TOOLS = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
TEXT = [
    "output_item.added",
    "content_part.added",
    "output_text.delta",
    "output_text.done",
    "content_part.done",
    "output_item.done",
]
CALL = [
    "output_item.added",
    "function_call_arguments.delta",
    "function_call_arguments.done",
    "output_item.done",
]


def merge_deltas(events: list[tuple[str, Json]]) -> list[str]:
    """The kinds of events in order; neighbouring ones of the same kind are one."""
    kinds = [kind.removeprefix("response.") for kind, _ in events]
    return [kind for kind, before in zip(kinds, ["", *kinds], strict=False) if kind != before]


@pytest.fixture
def events(ask, parse_events):
    """events(input, **members): the events of a streamed response."""

    async def read(input: str, **members: Any) -> list[tuple[str, Json]]:
        response = await ask(input, stream=True, **members)
        assert response.headers["content-type"].startswith("text/event-stream")
        assert "[DONE]" not in response.text
        found = parse_events(response.text)
        assert [data["type"] for _, data in found] == [kind for kind, _ in found]
        assert [data["sequence_number"] for _, data in found] == list(range(len(found)))
        return found

    return read


async def test_a_text_has_its_events_in_order_and_adds_up_to_the_response(api, events) -> None:
    api.worker.script = ["one two three"]
    found = await events("hello")
    assert merge_deltas(found) == ["created", "in_progress", *TEXT, "completed"]
    created, response = found[0][1]["response"], found[-1][1]["response"]
    assert (created["status"], created["output"], created["usage"]) == ("in_progress", [], None)
    assert created.keys() == response.keys()
    data = dict(found)
    added, done = data["response.output_item.added"], data["response.output_item.done"]
    assert added["item"] == {**done["item"], "status": "in_progress", "content": []}
    assert data["response.content_part.added"]["part"]["text"] == ""
    deltas = [body["delta"] for kind, body in found if kind == "response.output_text.delta"]
    assert "".join(deltas) == data["response.output_text.done"]["text"] == "one two three"
    assert response["output"] == [done["item"]]
    assert {body["item_id"] for _, body in found if "item_id" in body} == {done["item"]["id"]}


async def test_calls_follow_one_another_each_with_its_arguments(api, events) -> None:
    calls = [pb.ToolCall(id=f"c{n}", name="f", arguments=f'{{"n": {n}}}') for n in range(2)]
    api.worker.script = [calls]
    found = await events("hello", tools=TOOLS)
    assert merge_deltas(found) == ["created", "in_progress", *CALL, *CALL, "completed"]
    items = found[-1][1]["response"]["output"]
    assert [(item["call_id"], json.loads(item["arguments"])["n"]) for item in items] == [
        ("c0", 0),
        ("c1", 1),
    ]
    added = [body for kind, body in found if kind == "response.output_item.added"]
    assert [(body["output_index"], body["item"]["arguments"]) for body in added] == [
        (0, ""),
        (1, ""),
    ]
    done = [body for kind, body in found if kind == "response.output_item.done"]
    assert [body["item"] for body in done] == items


async def test_a_streamed_response_is_stored_like_a_plain_one(api, events, answer) -> None:
    api.worker.script = ["one two", "one two"]
    streamed = (await events("hello", kvrecall={"seed": 1}))[-1][1]["response"]
    assert (await api.http.get(f"/v1/responses/{streamed['id']}")).json() == streamed
    plain = await answer("hello", kvrecall={"seed": 1})
    varying = ("id", "created_at", "completed_at", "output")
    assert {k: v for k, v in plain.items() if k not in varying} == {
        k: v for k, v in streamed.items() if k not in varying
    }
    assert [item["content"] for item in plain["output"]] == [
        item["content"] for item in streamed["output"]
    ]


async def test_an_answer_that_was_cut_ends_as_incomplete(api, events) -> None:
    api.worker.script = ["one two three four"]
    found = await events("hello", max_output_tokens=2)
    kind, data = found[-1]
    assert (kind, data["response"]["status"]) == ("response.incomplete", "incomplete")
    assert data["response"]["output"][0]["content"][0]["text"] == "one two"


async def test_reasoning_has_events_of_its_own_before_those_of_the_text(
    api, events, reasoned
) -> None:
    found = await events("hello", include=["message.output_text.logprobs"])
    reasoning = ["output_item.added", "reasoning_text.delta", "reasoning_text.done"]
    kinds = [*reasoning, "output_item.done", *TEXT]
    assert merge_deltas(found) == ["created", "in_progress", *kinds, "completed"]
    data = dict(found)
    assert data["response.reasoning_text.done"]["text"] == "so it is"
    for kind in ("response.output_text.delta", "response.output_text.done"):
        assert data[kind]["logprobs"] == reasoned
    output = found[-1][1]["response"]["output"]
    assert [item["type"] for item in output] == ["reasoning", "message"]
    assert output[1]["content"][0]["logprobs"] == reasoned


async def test_an_answer_without_a_word_is_an_empty_text(api, events) -> None:
    api.worker.script = [""]
    found = await events("hello")
    kinds = [kind for kind in TEXT if kind != "output_text.delta"]
    assert merge_deltas(found) == ["created", "in_progress", *kinds, "completed"]
    assert found[-1][1]["response"]["output"][0]["content"][0]["text"] == ""


@pytest.mark.parametrize("stored", [True, False], ids=["turn", "store"])
async def test_an_error_within_a_stream_ends_it_as_failed(
    api, events, monkeypatch: pytest.MonkeyPatch, stored: bool
) -> None:
    if stored:
        api.worker.faults["done"] = WorkerLost("gone")
    else:

        async def refuse(*_: object) -> None:
            raise CatalogError("no space")

        monkeypatch.setattr(api.catalog.responses, "store", refuse)
    found = await events("hello")
    kind, data = found[-1]
    assert (kind, data["response"]["status"]) == ("response.failed", "failed")
    assert data["response"]["error"]["code"] == "server_error"
    assert "no space" not in json.dumps(data)
    assert (await api.http.get(f"/v1/responses/{data['response']['id']}")).status_code == 404


async def test_the_response_is_stored_before_its_end_is_sent(served, parse_events) -> None:
    body = {"model": served.service.info.model, "input": "hello", "stream": True}
    stored = asyncio.Event()
    store = served.catalog.responses.store

    async def wait_and_store(*values: Any) -> None:
        await stored.wait()
        await store(*values)

    served.catalog.responses.store = wait_and_store
    text = ""
    async with served.http.stream("POST", "/v1/responses", json=body) as response:
        async for chunk in response.aiter_text():
            text += chunk
            if "output_text.delta" in chunk and not stored.is_set():
                await asyncio.sleep(0.05)
                assert "response.completed" not in text
                stored.set()
    id = parse_events(text)[-1][1]["response"]["id"]
    assert (await served.http.get(f"/v1/responses/{id}")).status_code == 200


def put_together(pieces: list[str | ToolCall]) -> Json:
    """The response of an answer that came in these pieces."""
    name = TurnName("s_1", 3)
    head = build_head(name.response, 0, ResponseBody(model="m", input="a"), Sampling())
    events = ResponseEvents(head, name, 0)
    for piece in pieces:
        events.encode(TextDelta(piece) if isinstance(piece, str) else ToolCallEmitted(piece))
    reply = Message("assistant", "not read again")
    outcome = TurnOutcome("s_1", 3, reply, "tool_calls", 1, 1, MemoryReport(), (), {})
    return events.complete(outcome)


def test_text_and_calls_in_any_order_are_items_without_white_space_behind_them() -> None:
    """That before a text may be the indentation of code."""
    call = ToolCall("c1", "f", "{}")
    pieces: list[str | ToolCall] = ["  ", "  one", "  ", "two \n", call, "\n\n", call, " three"]
    response = put_together(pieces)
    texts = [
        item["content"][0]["text"] if item["type"] == "message" else item["name"]
        for item in response["output"]
    ]
    assert texts == ["    one  two", "f", "f", " three"]
    assert len({item["id"] for item in response["output"]}) == 4
