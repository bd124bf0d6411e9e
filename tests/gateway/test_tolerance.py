"""Requests of agents: what cannot be served is left out and named, and a history never bricks."""

import json
from typing import Any

import httpx
import pytest

from kvrecall.domain.limits import ServiceLimits
from kvrecall.protocol.v1 import worker_pb2 as pb

Json = dict[str, Any]
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
PIXEL = "iVBORw0KGgo="
LOOK = {"name": "look", "parameters": {"type": "object", "properties": {"q": {"type": "string"}}}}
TOOLS: dict[str, Json] = {
    CHAT: {"type": "function", "function": LOOK},
    RESPONSES: {"type": "function", **LOOK},
    MESSAGES: {"name": "look", "input_schema": LOOK["parameters"]},
}


async def ask(api: Any, path: str, said: list[Json], **members: Any) -> httpx.Response:
    body = {"model": api.service.info.model, "input" if path == RESPONSES else "messages": said}
    body |= {"max_tokens": 9} if path == MESSAGES else {}
    response: httpx.Response = await api.http.post(path, json=body | members)
    return response


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def called(path: str, arguments: str, id: str = "c1") -> list[Json]:
    """A call with these arguments in the form of an API, without its result."""
    function = {"name": "look", "arguments": arguments}
    if path == RESPONSES:
        return [{"type": "function_call", "call_id": id, **function}]
    if path == CHAT:
        call = {"id": id, "type": "function", "function": function}
        return [{"role": "assistant", "content": None, "tool_calls": [call]}]
    use = {"type": "tool_use", "id": id, "name": "look", "input": json.loads(arguments)}
    return [{"role": "assistant", "content": [use]}]


def answered(path: str, result: Any, id: str = "c1") -> list[Json]:
    """The result of a call in the form of an API."""
    if path == RESPONSES:
        return [{"type": "function_call_output", "call_id": id, "output": result}]
    if path == CHAT:
        return [{"role": "tool", "tool_call_id": id, "content": result}]
    return [
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": id, "content": result}],
        }
    ]


async def read(api: Any, response: httpx.Response) -> list[Any]:
    """All messages of an answer's session."""
    assert response.status_code == 200, response.text
    turns = await api.service.turns(response.headers["kvrecall-session"], 0, 99)
    return [message for turn in turns for message in turn.messages]


IMAGES: dict[str, Json] = {
    CHAT: {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}},
    RESPONSES: {"type": "input_image", "image_url": f"data:image/png;base64,{PIXEL}"},
    MESSAGES: {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": PIXEL},
    },
}
WORDS = "[image, image/png, 8 bytes: not shown, only text can be read here]"


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_an_image_in_a_result_becomes_words_and_the_conversation_goes_on(api, path) -> None:
    said = [user("Read it."), *called(path, "{}"), *answered(path, [IMAGES[path]])]
    first = await ask(api, path, said, tools=[TOOLS[path]])
    result = (await read(api, first))[-1]
    assert (result.role, result.content) == ("tool", WORDS)
    assert first.headers["kvrecall-ignored"].endswith(IMAGES[path]["type"])
    said += [{"role": "assistant", "content": "ok"}, user("Go on.")]
    second = await ask(api, path, said, tools=[TOOLS[path]])
    assert second.headers["kvrecall-match"] == "continued"


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_an_image_beside_text_is_a_line_of_its_own(api, path) -> None:
    kind = "input_text" if path == RESPONSES else "text"
    parts = [{"type": kind, "text": "What is this?"}, IMAGES[path]]
    response = await ask(api, path, [{"role": "user", "content": parts}])
    assert (await read(api, response))[0].content == f"What is this?\n{WORDS}"


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
@pytest.mark.parametrize(
    ("arguments", "mended"),
    [
        ('{"q": "a', {"q": "a"}),
        ('{"q": "a", "r": [1, 2', {"q": "a", "r": [1, 2]}),
        ("[1]", {}),
        ("null", {}),
        ("no JSON", {}),
        ('{"q": "\\ud83d"}', {"q": "\ufffd"}),
        ('{"q": "\\ud83d\\ude00 \\\\ud83d"}', {"q": "\U0001f600 \\ud83d"}),
    ],
)
async def test_arguments_that_were_cut_are_mended_and_the_conversation_goes_on(
    api, path: str, arguments: str, mended: Json
) -> None:
    said = [user("Look."), *called(path, arguments), *answered(path, "x"), user("Go on.")]
    first = await ask(api, path, said)
    (call,) = (await read(api, first))[1].tool_calls
    assert json.loads(call.arguments) == mended
    assert ("kvrecall-ignored" in first.headers) == (json.loads(call.arguments) != _load(arguments))
    said += [{"role": "assistant", "content": "ok"}, user("And on.")]
    assert (await ask(api, path, said)).headers["kvrecall-match"] == "continued"


def _load(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES, "/v1/sessions"])
async def test_half_an_emoji_in_a_body_is_replaced(api, path) -> None:
    body: Json
    if path == "/v1/sessions":
        path = f"{path}/{await api.session()}/turns"
        body = {"messages": [user("TEXT")]}
    else:
        name = "input" if path == RESPONSES else "messages"
        body = {"model": api.service.info.model, name: [user("TEXT")], "max_tokens": 9}
    content = json.dumps(body).replace("TEXT", r"a \ud83d b \ud83d\ude00 c \\ud83d").encode()
    headers = {"content-type": "application/json"}
    response = await api.http.post(path, content=content, headers=headers)
    assert response.status_code == 200, response.text
    session = response.headers.get("kvrecall-session") or response.json()["session"]
    (turn,) = await api.service.turns(session, 0, 1)
    assert turn.messages[0].content == "a \ufffd b \U0001f600 c \\ud83d"
    if "kvrecall-session" in response.headers:
        assert "body surrogates" in response.headers["kvrecall-ignored"]


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_a_call_without_a_result_says_so_to_the_model(api, path) -> None:
    said = [user("Look."), *called(path, "{}"), user("Never mind.")]
    first = await ask(api, path, said)
    assert [each.role for each in await read(api, first)] == ["user", "assistant", "tool", "user"]
    assert "without result" in first.headers["kvrecall-ignored"]
    said += [{"role": "assistant", "content": "ok"}, user("Go on.")]
    second = await ask(api, path, said)
    assert second.headers["kvrecall-match"] == "continued"


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_a_result_without_a_call_becomes_a_text_of_the_user(api, path) -> None:
    said = [user("Hello."), *answered(path, "it rains"), user("So?")]
    first = await ask(api, path, said)
    messages = await read(api, first)
    assert {each.role for each in messages} == {"user"}
    assert messages[1].content.endswith("it rains")
    assert "result without call" in first.headers["kvrecall-ignored"]


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_an_id_may_come_again_in_a_later_turn(api, path) -> None:
    once = [*called(path, "{}"), *answered(path, "x"), {"role": "assistant", "content": "ok"}]
    response = await ask(api, path, [user("a"), *once, user("b"), *once, user("c")])
    assert "kvrecall-ignored" not in response.headers
    assert response.status_code == 200


async def test_calls_that_share_an_id_get_their_results_in_order(api) -> None:
    (first,), (second,) = called(CHAT, '{"q": "a"}'), called(CHAT, '{"q": "b"}')
    first["tool_calls"] += second["tool_calls"]
    results = [*answered(CHAT, "one"), *answered(CHAT, "two")]
    response = await ask(api, CHAT, [user("Look."), first, *results])
    messages = await read(api, response)
    assert [each.content for each in messages[2:]] == ["one", "two"]
    assert len({each.tool_call_id for each in messages[2:]}) == 2
    assert "tool_calls[1].id duplicate" in response.headers["kvrecall-ignored"]


async def test_ids_may_be_long(api) -> None:
    id = "call_" + "x" * 3000
    said = [user("Look."), *called(CHAT, "{}", id), *answered(CHAT, "x", id)]
    response = await ask(api, CHAT, said)
    assert "kvrecall-ignored" not in response.headers
    assert (await read(api, response))[-1].content == "x"


async def test_a_call_may_be_written_as_before_there_were_several(api) -> None:
    call = {"name": "look", "arguments": "{}"}
    said = [
        user("Look."),
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "look", "content": "x"},
    ]
    messages = await read(api, await ask(api, CHAT, said))
    assert [each.content for each in messages] == ["Look.", "", "x"]
    assert messages[1].tool_calls[0].id == messages[2].tool_call_id


async def test_what_no_answer_needs_is_left_out_and_named(api) -> None:
    members: Json = {"web_search_options": {}, "prediction": {"type": "content", "content": "x"}}
    members |= {"modalities": ["text", "audio"], "audio": {"voice": "alloy", "format": "wav"}}
    response = await ask(api, CHAT, [user("Hello.")], **members)
    named = set(response.headers["kvrecall-ignored"].split(", "))
    assert named == {"prediction", "modalities", "audio"}
    refused = await ask(api, CHAT, [user("Hello.")], modalities=["audio"])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "modalities")


async def test_text_and_call_of_one_answer_may_be_two_messages(api) -> None:
    call = pb.ToolCall(id="c1", name="look", arguments="{}")
    api.worker.script = [[call], "done"]
    await ask(api, CHAT, [user("Look.")], tools=[TOOLS[CHAT]])
    text = {"role": "assistant", "content": ""}
    said = [user("Look."), text, *called(CHAT, "{}"), *answered(CHAT, "x")]
    response = await ask(api, CHAT, said, tools=[TOOLS[CHAT]])
    assert response.headers["kvrecall-match"] == "continued"


class TestWhereDamageIsRefused:
    """A service that refuses damaged histories."""

    @pytest.fixture
    def service_settings(self) -> ServiceLimits:
        return ServiceLimits(damaged_history="refuse")

    async def test_half_an_emoji_is_no_json(self, api) -> None:
        content = json.dumps({"model": "m", "messages": [user("TEXT")]}).replace("TEXT", r"\ud83d")
        headers = {"content-type": "application/json"}
        response = await api.http.post(CHAT, content=content.encode(), headers=headers)
        assert (response.status_code, response.json()["error"]["code"]) == (400, "malformed_json")
