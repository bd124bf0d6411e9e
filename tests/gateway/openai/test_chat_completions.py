"""OpenAI's chat completions over sessions: answers, streams, refusals, and what is found again."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from anthropic.types import ModelInfo
from openai.types import Model

from gateway.http.settings import GatewaySettings
from kvrecall.domain.errors import WorkerLost
from kvrecall.domain.limits import ServiceLimits
from kvrecall.protocol.v1 import worker_pb2 as pb

Json = dict[str, Any]
PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello there"}]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object"}, "strict": True},
    }
]


FORM: Json = {"type": "json_schema"}
# A keyword that no grammar has, within.
ODD = {"name": "odd", "strict": True, "schema": {"properties": {"a": {"not": {"type": "null"}}}}}
BAD = {"parameters": ODD["schema"]}


async def ask(api: Any, messages: list[Json], **body: Any) -> httpx.Response:
    model = api.service.info.model
    answer: httpx.Response = await api.http.post(
        PATH, json={"model": model, "messages": messages, **body}
    )
    return answer


def chunks(response: httpx.Response) -> list[Json]:
    """The chunks of a stream, which ends with [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n") if line and not line.startswith(":")]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def test_an_answer_has_the_members_that_clients_read(api) -> None:
    api.worker.script = ["hi there"]
    response = await ask(api, HELLO, max_tokens=5, user="ann", unknown={"x": 1})
    assert response.status_code == 200
    answer = response.json()
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hi there", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert response.headers["kvrecall-match"] == "built"
    assert response.headers["kvrecall-turn"] == "1"
    assert response.headers["x-request-id"]


async def test_the_next_request_goes_on_in_the_same_session_and_computes_what_is_new(api) -> None:
    api.worker.script = ["hi there", "fine"]
    first = await ask(api, HELLO)
    said = [*HELLO, first.json()["choices"][0]["message"], {"role": "user", "content": "and you"}]
    second = await ask(api, said)
    assert second.headers["kvrecall-match"] == "continued"
    assert second.headers["kvrecall-session"] == first.headers["kvrecall-session"]
    usage = second.json()["usage"]
    held = first.json()["usage"]["total_tokens"] - 1  # the last token has no row yet
    assert usage["prompt_tokens_details"]["cached_tokens"] == held


async def test_a_stream_says_the_role_the_text_and_why_it_ended_once_each(api) -> None:
    api.worker.script = ["one two three"]
    response = await ask(api, HELLO, stream=True, stream_options={"include_usage": True})
    *pieces, last = chunks(response)
    assert {piece["id"] for piece in pieces} == {last["id"]}
    deltas = [piece["choices"][0]["delta"] for piece in pieces]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas).strip() == "one two three"
    assert [piece["choices"][0]["finish_reason"] for piece in pieces[-2:]] == [None, "stop"]
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 3)
    assert all(piece["usage"] is None for piece in pieces)
    assert "usage" not in chunks(await ask(api, HELLO, stream=True))[-1]


async def test_streamed_calls_have_a_head_then_arguments_under_their_index(api) -> None:
    calls = [pb.ToolCall(id=f"c{n}", name="f", arguments=f'{{"n": {n}}}') for n in range(2)]
    api.worker.script = [calls]
    pieces = chunks(await ask(api, HELLO, stream=True, tools=TOOLS))
    parts = [
        call for piece in pieces for call in piece["choices"][0]["delta"].get("tool_calls", ())
    ]
    assert parts == [
        {
            "index": 0,
            "id": "c0",
            "type": "function",
            "function": {"name": "f", "arguments": ""},
        },
        {"index": 0, "function": {"arguments": '{"n":'}},
        {"index": 0, "function": {"arguments": " 0}"}},
        {
            "index": 1,
            "id": "c1",
            "type": "function",
            "function": {"name": "f", "arguments": ""},
        },
        {"index": 1, "function": {"arguments": '{"n":'}},
        {"index": 1, "function": {"arguments": " 1}"}},
    ]
    assert pieces[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_results_end_the_pause_however_the_client_echoes_the_call(api) -> None:
    call = pb.ToolCall(id="c1", name="f", arguments='{"n": 1}')
    api.worker.script = [[call], "done"]
    first = await ask(api, HELLO, tools=TOOLS)
    message = first.json()["choices"][0]["message"]
    assert (message["content"], message["tool_calls"][0]["id"]) == (None, "c1")
    echoed = {
        "role": "assistant",
        "tool_calls": [
            {"id": "other", "type": "function", "function": {"name": "f", "arguments": '{"n":1}'}}
        ],
    }
    result = {
        "role": "tool",
        "tool_call_id": "other",
        "content": [{"type": "text", "text": "1"}],
    }
    second = await ask(api, [*HELLO, echoed, result], tools=TOOLS)
    assert second.headers["kvrecall-match"] == "continued"
    assert second.json()["choices"][0]["message"]["content"] == "done"


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"messages": []}, "messages", "invalid_value"),
        ({"temperature": 3}, "temperature", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"n": 9}, "n", "invalid_value"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"tool_choice": {"type": "custom"}}, "tool_choice", "invalid_value"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice",
            "invalid_value",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
        ({"response_format": FORM | {"json_schema": ODD}}, "response_format", "invalid_value"),
        (
            {"response_format": FORM | {"json_schema": {"schema": 3}}},
            "response_format.json_schema.schema",
            "invalid_value",
        ),
        (
            {"response_format": FORM | {"json_schema": {"schema": {}, "strict": "yes"}}},
            "response_format.json_schema.strict",
            "invalid_value",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]},
            "tools[0].function.strict",
            "invalid_value",
        ),
        ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
        ({"frequency_penalty": 3}, "frequency_penalty", "invalid_value"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1", "invalid_value"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": True} | BAD}]},
            "tools[0].function.parameters",
            "invalid_value",
        ),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "invalid_value"),
        (
            {"messages": [{"role": "user", "content": [{"type": "hologram"}]}]},
            "messages[0].content[0].type",
            "invalid_value",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]},
            "messages[0].content[0].text",
            "invalid_type",
        ),
        ({"kvrecall": {"budget": 0}}, "kvrecall.budget", "invalid_value"),
        ({"kvrecall": {"research": {"method": "none"}}}, "research.method", "unknown_method"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name_and_changes_nothing(
    api, body: Json, param: str, code: str
) -> None:
    response = await ask(api, **{"messages": HELLO, **body})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, code)
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert await api.catalog.sessions.get_ids() == []


SAID = [*HELLO, {"role": "assistant", "content": "hi"}]
BAD_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "no JSON"}}


@pytest.mark.parametrize(
    ("last", "status", "param"),
    [
        ({"role": "user", "content": "x", "tool_call_id": "c1"}, 400, "messages[2].tool_call_id"),
        ({"role": "user", "content": "long " * 1000}, 400, "messages"),
    ],
    ids=["id of a call", "too long"],
)
async def test_a_bad_message_is_refused_by_its_place_before_a_session_is_begun_or_forked(
    api, last: Json, status: int, param: str
) -> None:
    for known in (False, True):
        if known:
            api.worker.script = ["hi", "more"]
            assert (await ask(api, HELLO)).status_code == 200
            assert (await ask(api, [*SAID, *HELLO])).status_code == 200
        before = await api.catalog.sessions.get_ids()
        response = await ask(api, [*SAID, last])
        assert (response.status_code, response.json()["error"]["param"]) == (status, param)
        assert await api.catalog.sessions.get_ids() == before


class TestWhereDamageIsRefused:
    """A service that refuses damaged histories."""

    @pytest.fixture
    def service_settings(self) -> ServiceLimits:
        return ServiceLimits(damaged_history="refuse")

    @pytest.mark.parametrize(
        ("message", "param"),
        [
            (
                {"role": "assistant", "tool_calls": [BAD_CALL]},
                "messages[1].tool_calls[0].arguments",
            ),
            ({"role": "user", "content": [{"type": "image_url"}]}, "messages[1].content[0]"),
        ],
    )
    async def test_a_damaged_message_is_refused_by_its_place(
        self, api, message: Json, param: str
    ) -> None:
        result = {"role": "tool", "tool_call_id": "c1", "content": "1"}
        response = await ask(api, [*HELLO, message, result])
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)

    async def test_calls_without_results_are_refused_in_the_words_that_clients_know(
        self, api
    ) -> None:
        call = {"id": "c9", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        asked = {"role": "assistant", "content": None, "tool_calls": [call]}
        response = await ask(api, [*HELLO, asked, *HELLO])
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "messages")
        assert error["code"] == "tool_result_missing"
        assert "must be followed by tool messages" in error["message"]
        assert "c9" in error["message"]


async def test_an_unknown_model_is_404_and_the_served_one_is_listed(api) -> None:
    response = await api.http.post(PATH, json={"model": "gpt-9", "messages": HELLO})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    (model,) = (await api.http.get("/v1/models")).json()["data"]
    assert model["id"] == api.service.info.model
    assert (await api.http.get(f"/v1/models/{model['id']}")).json() == model
    assert (await api.http.get("/v1/models/gpt-9")).json()["error"]["param"] == "model"
    listed = (await api.http.get("/v1/models/")).json()
    assert listed == (await api.http.get("/v1/models")).json()


async def test_a_models_lengths_are_where_clients_look_for_them(api) -> None:
    (model,) = (await api.http.get("/v1/models")).json()["data"]
    context, output = api.service.info.max_context, api.service.limits.max_output_tokens
    names = ("max_model_len", "context_length", "max_input_tokens")
    assert [model[name] for name in names] == [context] * 3
    assert model["meta"]["n_ctx_train"] == context
    assert [model[name] for name in ("max_completion_tokens", "max_tokens")] == [output] * 2
    assert Model.model_validate(model).owned_by == "kvrecall"
    assert ModelInfo.model_validate(model).max_input_tokens == context


class TestWithAliases:
    """A gateway that serves its model under other names too."""

    @pytest.fixture
    def gateway_settings(self) -> GatewaySettings:
        return GatewaySettings(model_aliases=("gpt-4o",))

    async def test_an_alias_answers_under_its_own_name(self, api) -> None:
        response = await api.http.post(PATH, json={"model": "gpt-4o", "messages": HELLO})
        assert response.json()["model"] == "gpt-4o"
        names = [each["id"] for each in (await api.http.get("/v1/models")).json()["data"]]
        assert names == [api.service.info.model, "gpt-4o"]


async def test_an_error_within_a_stream_is_its_last_event(api) -> None:
    api.worker.faults["done"] = WorkerLost("gone")
    response = await ask(api, HELLO, stream=True)
    *_, last, end = response.text.split("\n\n")
    error = json.loads(last.removeprefix("data: "))["error"]
    assert (end, error["type"], error["code"]) == ("", "server_error", "worker_lost")
    assert "[DONE]" not in response.text


async def test_a_request_that_is_sent_again_under_its_key_is_answered_once(api) -> None:
    body = {"model": api.service.info.model, "messages": HELLO}
    headers = {"Idempotency-Key": "retry-1"}
    first, second = [await api.http.post(PATH, json=body, headers=headers) for _ in range(2)]
    assert first.json()["choices"] == second.json()["choices"]
    assert first.headers["kvrecall-session"] == second.headers["kvrecall-session"]
    assert second.headers["kvrecall-turn"] == "1"


async def test_a_client_that_leaves_cancels_its_turn(served) -> None:
    served.worker.gates["token"] = asyncio.Event()
    request = asyncio.create_task(ask(served, HELLO))
    await served.worker.reached["token"].wait()
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    for _ in range(6000):
        if not served.service.status.admission.running:
            break
        await asyncio.sleep(0.01)
    assert not served.service.status.admission.running
    assert await served.catalog.sessions.get_ids() == []


async def test_no_tenant_finds_the_session_of_another(api) -> None:
    first = await ask(api, HELLO)
    said = [*HELLO, first.json()["choices"][0]["message"], *HELLO]
    body = {"model": api.service.info.model, "messages": said}
    response = await api.http.post(PATH, json=body, headers={"X-Kvrecall-Tenant": "ann"})
    assert response.headers["kvrecall-match"] == "built"
    assert response.headers["kvrecall-session"] != first.headers["kvrecall-session"]


async def test_options_of_the_answer_reach_the_worker(api) -> None:
    seen: list[pb.Sampling] = []
    worker_turn = api.worker.turn

    def record_turn(request: pb.TurnRequest) -> Any:
        seen.append(request.sampling)
        return worker_turn(request)

    api.worker.turn = record_turn
    tool = {"type": "function", "function": {"name": "f"}}
    await ask(
        api,
        HELLO,
        temperature=0,
        max_tokens=9,
        seed=5,
        frequency_penalty=0.5,
        presence_penalty=-0.25,
        repetition_penalty=1.5,
        min_p=0.125,
        logit_bias={"12": -100, "3": 2},
        logprobs=True,
        top_logprobs=4,
        tools=TOOLS,
        tool_choice={"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [tool]}},
        parallel_tool_calls=False,
        response_format={"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
    )
    await ask(api, HELLO, temperature=0, max_tokens=9, seed=5, tool_choice="auto", logprobs=False)
    await ask(api, HELLO, temperature=0, max_tokens=9, seed=5, tools=TOOLS, tool_choice=tool)
    plain: dict[str, Any] = {"max_tokens": 9, "seed": 5}
    assert seen == [
        pb.Sampling(
            **plain,
            frequency_penalty=0.5,
            presence_penalty=-0.25,
            repetition_penalty=1.5,
            min_p=0.125,
            logit_bias=[pb.TokenBias(id=3, bias=2.0), pb.TokenBias(id=12, bias=-100.0)],
            top_logprobs=4,
            constraint=pb.Constraint(
                schema='{"type": "object"}', tool_choice="auto", tools=["f"], single_call=True
            ),
        ),
        pb.Sampling(**plain),
        pb.Sampling(
            **plain,
            constraint=pb.Constraint(tool_choice="required", tools=["f"], single_call=True),
        ),
    ]


async def test_reasoning_and_log_probabilities_are_beside_the_text(api, reasoned) -> None:
    answer = (await ask(api, HELLO, logprobs=True, top_logprobs=1)).json()
    choice = answer["choices"][0]
    assert choice["logprobs"] == {"content": reasoned, "refusal": None}
    assert choice["message"] == {
        "role": "assistant",
        "content": "ok",
        "refusal": None,
        "reasoning_content": "so it is",
        "reasoning": "so it is",
    }
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2
    said = [*HELLO, choice["message"], {"role": "user", "content": "and you"}]
    again = await ask(api, said)
    assert again.headers["kvrecall-match"] == "continued", "reasoning is no part of the history"


async def test_a_stream_has_the_reasoning_before_the_text(api, reasoned) -> None:
    pieces = chunks(await ask(api, HELLO, stream=True, logprobs=True, top_logprobs=1))
    deltas = [piece["choices"][0] for piece in pieces]
    assert [each["delta"] for each in deltas[1:4]] == [
        {"reasoning_content": "so ", "reasoning": "so "},
        {"reasoning_content": "it is", "reasoning": "it is"},
        {"content": "ok"},
    ]
    assert [each["logprobs"] for each in deltas[1:]] == [
        None,
        None,
        {"content": reasoned, "refusal": None},
        None,
    ]
