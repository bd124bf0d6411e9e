"""Responses: plain answers, what they go on from, and what is refused."""

import json
from typing import Any

import pytest

from kvrecall.domain.limits import ServiceLimits
from kvrecall.protocol.v1 import worker_pb2 as pb

Json = dict[str, Any]
TOOLS = [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}]
CALL = pb.ToolCall(id="c1", name="f", arguments='{"n": 1}')

STRICTNESS: list[Json] = [{"strict": True}, {"strict": False}, {"strict": None}, {}]
ODD = {"type": "json_schema", "schema": {"not": {}}, "strict": True}


def user(text: str) -> Json:
    return {"role": "user", "content": text}


async def test_a_response_has_the_members_that_clients_read(api, ask) -> None:
    api.worker.script = ["hi there"]
    response = await ask("hello", metadata={"a": "b"}, unknown={"x": 1}, temperature=0.5)
    body = response.json()
    assert (body["object"], body["status"], body["error"]) == ("response", "completed", None)
    assert (body["metadata"], body["temperature"], body["store"]) == ({"a": "b"}, 0.5, True)
    (item,) = body["output"]
    assert item["id"].startswith("msg_")
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [
        {"type": "output_text", "text": "hi there", "annotations": [], "logprobs": []}
    ]
    usage = body["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    details = usage["input_tokens_details"]
    assert details == {"cached_tokens": 0, "cache_write_tokens": usage["input_tokens"]}
    assert usage["output_tokens_details"] == {"reasoning_tokens": 0}
    assert response.headers["kvrecall-match"] == "built"
    assert response.headers["kvrecall-turn"] == "1"


async def test_a_response_goes_on_from_another_and_computes_what_is_new(api, ask) -> None:
    api.worker.script = ["one", "two"]
    first = await ask("hello", instructions="be kind")
    second = await ask("more", instructions="be kind", previous_response_id=first.json()["id"])
    assert second.headers["kvrecall-match"] == "continued"
    assert second.headers["kvrecall-session"] == first.headers["kvrecall-session"]
    assert second.json()["previous_response_id"] == first.json()["id"]
    usage = second.json()["usage"]["input_tokens_details"]
    assert usage["cached_tokens"] == first.json()["usage"]["total_tokens"] - 1
    assert usage["cache_write_tokens"] == 3, "the reply's last token, the role and the word"


async def test_the_conversation_goes_on_under_other_instructions_without_the_former(
    api, ask, get_text
) -> None:
    api.worker.script = ["one", "two"]
    first = await ask("hello", instructions="be kind")
    second = await ask("more", instructions="be brief", previous_response_id=first.json()["id"])
    assert second.headers["kvrecall-match"] == "built"
    turns = await api.service.turns(second.headers["kvrecall-session"], 0, 9)
    said = [
        (message.role, message.content)
        for turn in turns
        for message in (*turn.messages, turn.outcome.message)
        if message is not None
    ]
    expected = [("system", "be brief"), ("user", "hello"), ("assistant", "one"), ("user", "more")]
    assert said == [*expected, ("assistant", "two")]
    assert get_text(second.json()) == "two"


async def test_a_second_response_to_the_same_one_is_a_branch(api, ask) -> None:
    api.worker.script = ["one", "two", "three", "four"]
    first = await ask("hello")
    branches = [await ask(text, previous_response_id=first.json()["id"]) for text in ("a", "b")]
    assert [each.headers["kvrecall-match"] for each in branches] == ["continued", "forked"]
    third = await ask("more", previous_response_id=branches[1].json()["id"])
    assert third.headers["kvrecall-match"] == "continued"
    assert third.headers["kvrecall-session"] == branches[1].headers["kvrecall-session"]


async def test_a_call_and_its_result_go_through_items(api, answer, get_text) -> None:
    api.worker.script = [[CALL], "done"]
    first = await answer("hello", tools=TOOLS)
    (call,) = first["output"]
    assert call["id"].startswith("fc_")
    assert (call["type"], call["call_id"], call["name"]) == ("function_call", "c1", "f")
    assert (json.loads(call["arguments"]), call["status"]) == ({"n": 1}, "completed")
    assert first["tools"][0]["strict"] is True
    result = {"type": "function_call_output", "call_id": "c1", "output": "1"}
    second = await answer([result], tools=TOOLS, previous_response_id=first["id"])
    assert get_text(second) == "done"


async def test_a_reference_stands_for_the_item_that_was_answered(api, ask) -> None:
    api.worker.script = [[CALL], "done"]
    first = await ask("hello", tools=TOOLS)
    (call,) = first.json()["output"]
    reference = {"type": "item_reference", "id": call["id"]}
    result = {"type": "function_call_output", "call_id": "c1", "output": "1"}
    second = await ask([user("hello"), reference, result], tools=TOOLS)
    assert second.headers["kvrecall-match"] == "continued"
    unknown = {"type": "item_reference", "id": call["id"].replace("_o0", "_o7")}
    for other in (unknown, {"type": "item_reference", "id": "msg_1"}, {"type": "item_reference"}):
        error = (await ask([user("hello"), other])).json()["error"]
        assert (error["param"], error["code"]) == ("input[1].id", "item_not_found")


async def test_no_tenant_finds_what_another_has_stored(api, ask) -> None:
    first = (await ask("hello")).json()
    headers = {"X-Kvrecall-Tenant": "ann"}
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    missing = await ask("more", headers, previous_response_id="resp_0_1")
    foreign = await ask("more", headers, previous_response_id=first["id"])
    assert (foreign.status_code, missing.status_code) == (400, 400)
    code = "previous_response_not_found"
    assert [each.json()["error"]["code"] for each in (foreign, missing)] == [code, code]
    assert (await ask([reference], headers)).json()["error"]["code"] == "item_not_found"
    for method, path in (
        ("GET", ""),
        ("DELETE", ""),
        ("GET", "/input_items"),
        ("POST", "/cancel"),
    ):
        for id in (first["id"], "resp_0_1"):
            url = f"/v1/responses/{id}{path}"
            answer = await api.http.request(method, url, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (
                404,
                "response_not_found",
            )


async def test_a_response_that_is_not_stored_is_not_gone_on_from_but_its_session_is(
    api, ask
) -> None:
    api.worker.script = ["one", "two"]
    first = await ask("hello", store=False)
    assert first.json()["store"] is False
    refused = await ask("more", previous_response_id=first.json()["id"])
    assert refused.json()["error"]["param"] == "previous_response_id"
    said = [user("hello"), *first.json()["output"], user("more")]
    second = await ask(said, store=False)
    assert second.headers["kvrecall-match"] == "continued"


async def test_an_answer_that_was_cut_is_incomplete(api, answer) -> None:
    api.worker.script = ["one two three four"]
    body = await answer("hello", max_output_tokens=2)
    assert body["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert body["output"][0]["status"] == "incomplete"


async def test_a_request_that_is_sent_again_under_its_key_gets_the_same_response(api, ask) -> None:
    headers = {"Idempotency-Key": "retry-1"}
    first, second = [await ask("hello", headers) for _ in range(2)]
    assert first.json()["output"] == second.json()["output"]
    assert first.json()["id"] == second.json()["id"]
    headers = {"Idempotency-Key": "retry-2"}
    more = [await ask("m", headers, previous_response_id=first.json()["id"]) for _ in range(2)]
    assert [each.headers["kvrecall-match"] for each in more] == ["continued", "repeated"]
    assert more[0].json()["id"] == more[1].json()["id"]
    assert len(await api.catalog.sessions.get_ids()) == 1


async def test_the_tokens_of_an_input_are_those_of_the_whole_conversation(api, ask) -> None:
    api.worker.script = ["one two"]
    first = await ask("hello there", instructions="be kind")
    counts = []
    for members in (
        {"input": "more", "previous_response_id": first.json()["id"]},
        {"input": [user("hello there"), *first.json()["output"], user("more")]},
    ):
        body = {"model": api.service.info.model, "instructions": "be kind", **members}
        counted = (await api.http.post("/v1/responses/input_tokens", json=body)).json()
        assert counted.pop("object") == "response.input_tokens"
        counts.append(counted["input_tokens"])
    assert counts[0] == counts[1] > 8
    body = {"model": api.service.info.model}
    refused = await api.http.post("/v1/responses/input_tokens", json=body)
    assert refused.json()["error"]["param"] == "input"


async def test_reasoning_is_an_item_before_the_text_and_no_part_of_the_history(
    api, ask, reasoned
) -> None:
    logprobs = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    first = await ask("hello", **logprobs)
    reasoning, text = first.json()["output"]
    assert reasoning["id"].startswith("rs_")
    assert (reasoning["type"], reasoning["summary"]) == ("reasoning", [])
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "so it is"}]
    assert text["content"][0]["logprobs"] == reasoned
    assert first.json()["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}
    said = [user("hello"), *first.json()["output"], user("more")]
    second = await ask(said)
    assert second.headers["kvrecall-match"] == "continued"
    page = await api.http.get(f"/v1/responses/{second.json()['id']}/input_items")
    assert [item["id"] for item in page.json()["data"][1:3]] == [text["id"], reasoning["id"]]


BAD_CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "no JSON"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "1"}


@pytest.mark.parametrize(
    ("members", "param", "code"),
    [
        ({"input": []}, "input", "invalid_value"),
        (
            {"input": [{"type": "compaction_trigger"}]},
            "input[0].type",
            "unsupported_content",
        ),
        (
            {"prompt_cache_options": {"prewarm": True}},
            "prompt_cache_options.prewarm",
            "unsupported_parameter",
        ),
        ({"generate": False}, "generate", "unsupported_parameter"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "invalid_value"),
        ({"background": True, "store": False}, "background", "invalid_value"),
        ({"prompt": {"id": "p"}}, "prompt", "unsupported_parameter"),
        (
            {"tools": [{"type": "web_search"}], "tool_choice": {"type": "function", "name": "f"}},
            "tool_choice",
            "invalid_value",
        ),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "invalid_value"),
        ({"text": {"format": ODD}}, "text.format", "invalid_value"),
        (
            {"text": {"format": {"type": "json_schema", "schema": 3}}},
            "text.format.schema",
            "invalid_value",
        ),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "invalid_value"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"top_logprobs": 21}, "top_logprobs", "invalid_value"),
        (
            {"tools": [{**TOOLS[0], "parameters": ODD["schema"]}]},
            "tools[0].parameters",
            "invalid_value",
        ),
        ({"temperature": 3}, "temperature", "invalid_value"),
        ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
        ({"metadata": {"a": 1}}, "metadata.a", "invalid_value"),
        ({"kvrecall": {"budget": 0}}, "kvrecall.budget", "invalid_value"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "previous_response_not_found"),
        (
            {"previous_response_id": "resp_1", "conversation": "conv_1"},
            "previous_response_id",
            "invalid_value",
        ),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name_and_changes_nothing(
    api, ask, members: Json, param: str, code: str
) -> None:
    response = await ask(**{"input": "hello", **members})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, code)
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert await api.catalog.sessions.get_ids() == []


class TestWhereDamageIsRefused:
    """A service that refuses damaged histories."""

    @pytest.fixture
    def service_settings(self) -> ServiceLimits:
        return ServiceLimits(damaged_history="refuse")

    @pytest.mark.parametrize(
        ("input", "param", "code"),
        [
            (
                [user("a"), {"role": "user", "content": [{"type": "input_image"}]}],
                "input[1].content[0]",
                "unsupported_content",
            ),
            ([user("a"), RESULT], "input[1]", "tool_call_unknown"),
            ([user("a"), BAD_CALL, RESULT], "input[1]", "invalid_value"),
            (
                [user("a"), {**BAD_CALL, "arguments": "{}"}, user("b")],
                "input",
                "tool_result_missing",
            ),
        ],
    )
    async def test_a_damaged_history_is_refused_by_its_place(
        self, api, ask, input: Json, param: str, code: str
    ) -> None:
        response = await ask(input)
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["code"]) == (400, param, code)
        assert await api.catalog.sessions.get_ids() == []


async def test_what_is_noted_changes_nothing_and_is_given_back(answer) -> None:
    noted = {
        "user": "ann",
        "truncation": "auto",
        "max_tool_calls": 3,
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "reasoning": {"effort": "low", "summary": None},
        "include": ["reasoning.encrypted_content"],
    }
    body = await answer("hello", **noted, text={"format": {"type": "text"}}, instructions=None)
    given = {name: value for name, value in noted.items() if name != "include"}
    assert {name: body[name] for name in given} == given
    assert body["text"]["format"] == {"type": "text"}


async def test_a_tool_is_reported_strict_if_it_asked_for_it(answer) -> None:
    plain = {name: value for name, value in TOOLS[0].items() if name != "strict"}
    tools = [{**plain, "name": f"f{n}", **each} for n, each in enumerate(STRICTNESS)]
    first = await answer("hello", tools=tools)
    assert [tool["strict"] for tool in first["tools"]] == [True, False, False, False]


async def test_instructions_alone_are_counted(api: Any) -> None:
    body = {"model": api.service.info.model, "instructions": "be brief"}
    counted = await api.http.post("/v1/responses/input_tokens", json=body)
    assert counted.status_code == 200, counted.text
    assert counted.json()["input_tokens"] > 0
