"""Requests that say where they go on: in a session by its id, or in none that stays."""

from typing import Any

import httpx
import pytest

from kvrecall.protocol.v1 import worker_pb2 as pb

Json = dict[str, Any]
CALL = pb.ToolCall(id="c1", name="f", arguments='{"n": 1}')
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def user(text: str) -> Json:
    return {"role": "user", "content": text}


async def chat(
    api: Any, messages: list[Json], headers: Json | None = None, **members: Any
) -> httpx.Response:
    body = {"model": api.service.info.model, "messages": messages, **members}
    answer: httpx.Response = await api.http.post(
        "/v1/chat/completions", json=body, headers=headers or {}
    )
    return answer


def message_of(answer: httpx.Response) -> Json:
    found: Json = answer.json()["choices"][0]["message"]
    return found


async def test_a_session_of_the_session_api_goes_on_by_its_id(api) -> None:
    api.worker.script = ["one", "two", "three"]
    session = await api.session()
    await api.turn(session, "hello")
    said = [user("hello"), {"role": "assistant", "content": "one"}]
    whole = await chat(api, [*said, user("more")], {"kvrecall-session": session})
    assert message_of(whole)["content"] == "two"
    new = {"kvrecall-session": session, "kvrecall-history": "new"}
    third = await chat(api, [user("and more")], new)
    assert message_of(third)["content"] == "three"
    for number, answer in enumerate((whole, third), 2):
        assert answer.headers["kvrecall-session"] == session
        assert answer.headers["kvrecall-match"] == "continued"
        assert answer.headers["kvrecall-turn"] == str(number)
    members = {"session": session, "history": "new"}
    assert (await chat(api, [user("last")], kvrecall=members)).status_code == 200
    assert (await api.service.get(session))[0].turns == 4


async def test_a_result_goes_to_the_call_that_the_session_waits_for(api) -> None:
    api.worker.script = [[CALL], "done", [CALL], "done"]
    first = await chat(api, [user("hello")], tools=TOOLS)
    headers = {"kvrecall-session": first.headers["kvrecall-session"]}
    asked = message_of(first) | {"content": None}
    asked["tool_calls"][0]["id"] = "other"
    result = {"role": "tool", "tool_call_id": "other", "content": "1"}
    messages = [user("hello"), asked, result]
    second = await chat(api, messages, headers, tools=TOOLS)
    assert message_of(second)["content"] == "done"
    await chat(api, [*messages, message_of(second), user("again")], headers, tools=TOOLS)
    new = headers | {"kvrecall-history": "new"}
    refused = await chat(api, [user("no result")], new)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "tool_result_missing")
    fourth = await chat(api, [{"role": "tool", "tool_call_id": "c1", "content": "2"}], new)
    assert message_of(fourth)["content"] == "done"


@pytest.mark.parametrize(
    ("messages", "members"),
    [
        ([user("other"), {"role": "assistant", "content": "ok"}, user("more")], {}),
        ([user("hello"), {"role": "assistant", "content": "ok"}], {}),
        ([user("more")], {}),
        ([user("hello"), {"role": "assistant", "content": "ok"}, user("a")], {"tools": TOOLS}),
    ],
)
async def test_another_conversation_than_the_sessions_is_a_conflict_that_no_repeat_helps(
    api, messages: list[Json], members: Json
) -> None:
    session = (await chat(api, [user("hello")])).headers["kvrecall-session"]
    answer = await chat(api, messages, {"kvrecall-session": session}, **members)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (409, "session_mismatch")
    assert (error["type"], answer.headers["x-should-retry"]) == ("conflict_error", "false")
    assert (await api.service.get(session))[0].turns == 1


async def test_a_request_that_is_repeated_is_answered_once(api) -> None:
    session = await api.session()
    headers = {"kvrecall-session": session, "Idempotency-Key": "k"}
    answers = [await chat(api, [user("hello")], headers) for _ in range(2)]
    assert [each.headers["kvrecall-match"] for each in answers] == ["continued", "repeated"]
    assert (await api.service.get(session))[0].turns == 1


async def test_no_tenant_goes_on_in_the_session_of_another(api) -> None:
    session = await api.session()
    for id in (session, "s_0"):
        headers = {"kvrecall-session": id, "X-Kvrecall-Tenant": "ann"}
        answer = await chat(api, [user("hello")], headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_session")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("headers", [{"kvrecall-session": "none"}, {"kvrecall-retain": "none"}])
async def test_nothing_is_kept_if_that_is_asked_for(api, headers: Json, stream: bool) -> None:
    first = await chat(api, [user("hello")])
    said = [user("hello"), message_of(first), user("more")]
    answer = await chat(api, said, headers, stream=stream)
    assert (answer.status_code, answer.headers["kvrecall-match"]) == (200, "built")
    assert await api.catalog.sessions.get_ids() == [first.headers["kvrecall-session"]]
    response = {"model": api.service.info.model, "input": "hello", "store": False}
    message = {**response, "messages": [user("hello")], "max_tokens": 9}
    for path, body in (("/v1/responses", response), ("/v1/messages", message)):
        answer = await api.http.post(path, json={**body, "stream": stream}, headers=headers)
        assert answer.status_code == 200
    assert await api.catalog.sessions.get_ids() == [first.headers["kvrecall-session"]]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"kvrecall": {"session": "s_1"}}, "kvrecall.session"),
        ({"kvrecall": {"session": "none"}}, "store"),
        ({"kvrecall": {"retain": "none"}, "store": True}, "store"),
        ({"kvrecall": {"session": "s_1", "retain": "none"}}, "kvrecall.session"),
        ({"kvrecall": {"history": "new"}}, "kvrecall.history"),
        ({"kvrecall": {"session": "s_1", "budget": 64}}, "kvrecall.session"),
    ],
)
async def test_what_a_response_cannot_do_is_refused(api, body: Json, param: str) -> None:
    own = {"model": api.service.info.model, "input": "hello", **body}
    answer = await api.http.post("/v1/responses", json=own)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert await api.catalog.sessions.get_ids() == []


@pytest.mark.parametrize("name", ["kvrecall-session", "kvrecall-retain"])
async def test_several_answers_have_sessions_of_their_own(api, name: str) -> None:
    api.worker.script = ["one"]
    session = await api.session()
    headers = {name: session if name == "kvrecall-session" else "none"}
    answer = await chat(api, [user("hello")], headers, n=2)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "n"
    assert (await api.service.get(session))[0].turns == 0
