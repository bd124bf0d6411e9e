"""Anthropic's messages over sessions: answers, streams, refusals, and what is found again."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import httpx
import pytest

from gateway.anthropic.messages import MessageEvents, build_message
from gateway.anthropic.schemas import MessagesBody
from gateway.http.sse import read_outcome
from kvrecall.domain.answer.constraints import Constraint, ToolChoice
from kvrecall.domain.errors import WorkerLost
from kvrecall.domain.events import TurnFinished
from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.messages import Message, Sampling
from kvrecall.domain.sessions.request import CreateSession
from kvrecall.domain.turn_request import TurnRequest
from kvrecall.protocol.v1 import worker_pb2 as pb
from services.conversations.continuation import Conversation
from services.streams.turn import ReasoningDelta, TextDelta, TurnProgress

Json = dict[str, Any]
PATH = "/v1/messages"
HELLO = [{"role": "user", "content": "hello there"}]
TOOLS = [{"name": "f", "description": "Does.", "input_schema": {"type": "object"}}]


async def ask(api: Any, messages: Sequence[Any], **body: Any) -> httpx.Response:
    body = {"model": api.service.info.model, "max_tokens": 50, "messages": messages, **body}
    answer: httpx.Response = await api.http.post(PATH, json=body)
    return answer


async def test_an_answer_has_the_members_that_clients_read(api) -> None:
    api.worker.script = ["hi there"]
    response = await ask(api, HELLO, system="You help.", metadata={"user_id": "ann"})
    assert response.status_code == 200
    answer = response.json()
    assert answer["id"].startswith("msg_")
    assert (answer["type"], answer["role"]) == ("message", "assistant")
    assert answer["content"] == [{"type": "text", "text": "hi there"}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    assert answer["usage"]["output_tokens"] == 2
    assert response.headers["kvrecall-match"] == "built"
    assert response.headers["request-id"] == response.headers["x-request-id"]


async def test_the_next_request_goes_on_in_the_same_session_and_computes_what_is_new(api) -> None:
    api.worker.script = ["hi there", "fine"]
    first = await ask(api, HELLO)
    said = [
        *HELLO,
        {"role": "assistant", "content": first.json()["content"]},
        {"role": "user", "content": "and you"},
    ]
    second = await ask(api, said)
    assert second.headers["kvrecall-match"] == "continued"
    assert second.headers["kvrecall-session"] == first.headers["kvrecall-session"]
    usage, before = second.json()["usage"], first.json()["usage"]
    # The last token of an answer has no row yet.
    held = before["input_tokens"] + before["output_tokens"] - 1
    assert usage["cache_read_input_tokens"] == held
    assert usage["cache_creation_input_tokens"] == 0
    marked = [*said[:2], {"role": "user", "content": [{"type": "text", "text": "and you"}]}]
    marked[-1]["content"][0]["cache_control"] = {"type": "ephemeral"}
    other = (await ask(api, marked)).json()["usage"]
    assert other["cache_creation_input_tokens"] == usage["input_tokens"]
    assert other["input_tokens"] == 0


async def test_a_stream_begins_the_message_and_ends_it_with_its_reason_and_counts(
    api, parse_events
) -> None:
    api.worker.script = ["one two three"]
    response = await ask(api, HELLO, stream=True)
    events = parse_events(response.text)
    assert all(name == data["type"] for name, data in events)
    names = [name for name, _ in events]
    assert names == [
        "message_start",
        "ping",
        "content_block_start",
        *["content_block_delta"] * 3,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    text = "".join(data["delta"]["text"] for name, data in events if name.endswith("block_delta"))
    assert text.strip() == "one two three"
    start, end = events[0][1]["message"], events[-2][1]
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert end["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert end["usage"]["output_tokens"] == 3


async def test_streamed_calls_are_blocks_of_their_own_after_the_text(api, parse_events) -> None:
    calls = [pb.ToolCall(id=f"c{n}", name="f", arguments=f'{{"n": {n}}}') for n in range(2)]
    api.worker.script = [calls]
    events = parse_events((await ask(api, HELLO, stream=True, tools=TOOLS)).text)
    blocks = [data for name, data in events if name.startswith("content_block")]
    assert [block["index"] for block in blocks] == [0] * 5 + [1] * 5
    assert blocks[0]["content_block"] == {"type": "tool_use", "id": "c0", "name": "f", "input": {}}
    deltas = [block["delta"] for block in blocks[6:9]]
    assert {delta["type"] for delta in deltas} == {"input_json_delta"}
    assert [delta["partial_json"] for delta in deltas] == ["", '{"n":', " 1}"]
    assert [block["type"] for block in (blocks[0], blocks[4])] == [
        "content_block_start",
        "content_block_stop",
    ]
    assert events[-2][1]["delta"]["stop_reason"] == "tool_use"


async def test_results_end_the_pause_also_those_of_failed_calls(api) -> None:
    calls = [pb.ToolCall(id=f"c{n}", name="f", arguments=f'{{"n": {n}}}') for n in range(3)]
    api.worker.script = [calls, "done"]
    first = (await ask(api, HELLO, tools=TOOLS)).json()
    assert first["content"][1] == {"type": "tool_use", "id": "c1", "name": "f", "input": {"n": 1}}
    results = [
        {"type": "tool_result", "tool_use_id": "c2", "is_error": True},
        {"type": "tool_result", "tool_use_id": "c1", "is_error": True, "content": "gone"},
        {
            "type": "tool_result",
            "tool_use_id": "c0",
            "content": [{"type": "text", "text": "o"}, {"type": "text", "text": "k"}],
        },
        {"type": "text", "text": "go on"},
    ]
    asked = {"role": "assistant", "content": [THOUGHT, *first["content"]]}
    said = [*HELLO, asked, {"role": "user", "content": results}]
    second = await ask(api, said, tools=TOOLS)
    assert second.headers["kvrecall-match"] == "continued"
    session = second.headers["kvrecall-session"]
    (turn,) = await api.service.turns(session, 1, 1)
    assert [message.content for message in turn.messages] == ["ok", "gone", "error", "go on"]


async def test_a_stop_sequence_is_named_and_not_said(api) -> None:
    api.worker.script = ["one two END three", "one two"]
    answer = (await ask(api, HELLO, stop_sequences=["never", "END"])).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "END")
    assert answer["content"] == [{"type": "text", "text": "one two"}]
    answer = (await ask(api, HELLO, stop_sequences=["END"])).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)


@pytest.mark.parametrize(
    ("body", "constraint"),
    [
        ({}, Constraint()),
        ({"tool_choice": {"type": "auto"}}, Constraint()),
        ({"tool_choice": {"type": "none"}}, Constraint(tool_choice=ToolChoice.NONE)),
        ({"tool_choice": {"type": "any"}}, Constraint(tool_choice=ToolChoice.REQUIRED)),
        (
            {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
            Constraint(tool_choice=ToolChoice.REQUIRED, single_call=True),
        ),
        (
            {"tool_choice": {"type": "tool", "name": "f"}},
            Constraint(tool_choice=ToolChoice.REQUIRED, tools=("f",), single_call=True),
        ),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
            Constraint(schema='{"type": "object"}', strict=True),
        ),
        (
            {"output_format": {"type": "json_schema", "schema": {"type": "object"}}},
            Constraint(schema='{"type": "object"}', strict=True),
        ),
    ],
)
def test_choices_of_tools_and_forms_of_text_constrain_the_answer(
    body: Json, constraint: Constraint
) -> None:
    parsed = MessagesBody.model_validate({"model": "m", "max_tokens": 9, "messages": HELLO, **body})
    sampling = parsed.turn_to_domain(ServiceLimits(), Sampling()).sampling
    assert sampling is not None
    assert sampling.constraint == constraint


async def test_reasoning_is_a_block_before_the_text(api, parse_events) -> None:
    found = await api.service.conversations.turn(
        Conversation((Message("user", "a"),), CreateSession(), TurnRequest(()))
    )
    outcome = await read_outcome(found.stream)
    outcome = replace(outcome, message=Message("assistant", "yes", reasoning="hm"))
    whole = build_message("m", False, outcome, found)
    assert whole["content"] == [{**THOUGHT, "signature": ""}, {"type": "text", "text": "yes"}]
    encoder = MessageEvents("m", False, False, found)
    progress: list[TurnProgress] = [
        ReasoningDelta("h"),
        ReasoningDelta("m"),
        TextDelta("yes"),
        TurnFinished(outcome),
    ]
    events = parse_events(b"".join(encoder.encode(each) for each in progress).decode())
    blocks = [data for name, data in events if name.startswith("content_block")]
    assert blocks[0]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
    deltas = [data["delta"] for data in blocks if "delta" in data]
    assert [delta["type"] for delta in deltas] == [
        *["thinking_delta"] * 2,
        "signature_delta",
        "text_delta",
    ]
    assert [data["index"] for data in blocks] == [0] * 5 + [1] * 3


async def test_a_streamed_text_is_indented_as_the_whole_one(api, parse_events) -> None:
    found = await api.service.conversations.turn(
        Conversation((Message("user", "a"),), CreateSession(), TurnRequest(()))
    )
    await read_outcome(found.stream)
    pieces: list[TurnProgress]
    pieces = [ReasoningDelta("hm"), TextDelta("  "), TextDelta("  x = 1"), TextDelta(" \n")]
    encoder = MessageEvents("m", False, False, found)
    events = parse_events(b"".join(encoder.encode(each) for each in pieces).decode())
    texts = [data["delta"].get("text", "") for _, data in events if "delta" in data]
    assert "".join(texts) == "    x = 1"


THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "s"}
IMAGE = {"type": "image", "source": {}}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"messages": []}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "some"}, "tools": TOOLS}, "tool_choice.type"),
        ({"tool_choice": {"type": "tool"}, "tools": TOOLS}, "tool_choice.name"),
        ({"tool_choice": {"type": "tool", "name": "g"}, "tools": TOOLS}, "tool_choice"),
        ({"tools": [{"type": "web_surf_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
            "output_config.format.schema",
        ),
        (
            {"tools": [{**TOOLS[0], "strict": True, "input_schema": {"not": {}}}]},
            "tools[0].input_schema",
        ),
        ({"system": [{"type": "hologram"}]}, "system.content[0].type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [*HELLO, {"role": "user", "content": [{"type": "text"}]}]},
            "messages[1].content[0].text",
        ),
        ({"messages": [*HELLO, {"role": "assistant", "content": "I "}]}, "messages[1]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"kvrecall": {"budget": 0}}, "kvrecall.budget"),
        ({"kvrecall": {"research": {"method": "none"}}}, "research.method"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name_and_changes_nothing(
    api, body: Json, field: str
) -> None:
    response = await ask(api, **{"messages": HELLO, **body})
    answer = response.json()
    assert (response.status_code, answer["type"]) == (400, "error")
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["message"].startswith(f"{field}: ")
    assert answer["request_id"] == response.headers["request-id"]
    assert await api.catalog.sessions.get_ids() == []


class TestWhereDamageIsRefused:
    """A service that refuses damaged histories."""

    @pytest.fixture
    def service_settings(self) -> ServiceLimits:
        return ServiceLimits(damaged_history="refuse")

    async def test_an_image_is_refused_by_its_place(self, api) -> None:
        error = (await ask(api, [{"role": "user", "content": [IMAGE]}])).json()["error"]
        assert error["message"].startswith("messages[0].content[0]: ")

    async def test_a_result_without_its_call_is_refused_by_its_place_in_the_request(
        self, api
    ) -> None:
        await refuse_results(api)


async def refuse_results(api: Any) -> None:
    """Check the words for results without calls, and calls without results."""
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "1"}
    said = [*HELLO, {"role": "assistant", "content": "hi"}, {"role": "user", "content": [result]}]
    error = (await ask(api, said, system="You help.")).json()["error"]
    assert error["message"].startswith("messages[2].content[0].tool_use_id: ")
    use = {"type": "tool_use", "id": "c1", "name": "f", "input": {}}
    said = [*HELLO, {"role": "assistant", "content": [use]}, *HELLO]
    error = (await ask(api, said)).json()["error"]
    assert "tool_result" in error["message"]
    assert "c1" in error["message"]


async def test_an_unknown_model_and_an_unknown_route_are_404_in_this_form(api) -> None:
    response = await ask(api, HELLO, model="claude-9")
    assert (response.status_code, response.json()["error"]["type"]) == (404, "not_found_error")
    response = await api.http.get(f"{PATH}/batches")
    assert (response.status_code, response.json()["error"]["type"]) == (404, "not_found_error")


async def test_an_error_within_a_stream_is_its_last_event(api, parse_events) -> None:
    api.worker.faults["done"] = WorkerLost("gone")
    name, data = parse_events((await ask(api, HELLO, stream=True)).text)[-1]
    assert (name, data["error"]["type"]) == ("error", "overloaded_error")


async def test_tokens_are_counted_without_a_session(api) -> None:
    body = {"model": api.service.info.model, "messages": HELLO, "system": "You help."}
    response = await api.http.post(f"{PATH}/count_tokens", json=body)
    assert response.json() == {"input_tokens": 3 + 3}
    assert await api.catalog.sessions.get_ids() == []
    api.worker.faults["tokenize"] = WorkerLost("gone")
    response = await api.http.post(f"{PATH}/count_tokens", json=body)
    assert (response.status_code, response.json()["type"]) == (503, "error")


async def test_no_tenant_finds_the_session_of_another(api) -> None:
    first = await ask(api, HELLO)
    said = [*HELLO, {"role": "assistant", "content": first.json()["content"]}, *HELLO]
    body = {"model": api.service.info.model, "max_tokens": 9, "messages": said}
    response = await api.http.post(PATH, json=body, headers={"X-Kvrecall-Tenant": "ann"})
    assert response.headers["kvrecall-match"] == "built"
