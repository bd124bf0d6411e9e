"""Threads: a request says only what follows an earlier answer, and goes on in its session."""

from typing import Any

import httpx
import pytest

from kvrecall.protocol.v1 import worker_pb2 as pb

Json = dict[str, Any]
PATH = "/v1/messages"
TOOLS = [{"name": "f", "input_schema": {"type": "object"}}]


def user(text: str) -> Json:
    return {"role": "user", "content": text}


async def ask(api: Any, *messages: Json, tenant: str = "", **body: Any) -> httpx.Response:
    body = {"model": api.service.info.model, "max_tokens": 50, "messages": messages, **body}
    headers = {"X-Kvrecall-Tenant": tenant} if tenant else {}
    answer: httpx.Response = await api.http.post(PATH, json=body, headers=headers)
    return answer


def follow(answer: httpx.Response) -> Json:
    return {"type": "continue", "previous_message_id": answer.json()["id"]}


async def test_a_thread_goes_on_in_the_session_of_its_message(api) -> None:
    calls = [pb.ToolCall(id="c1", name="f", arguments="{}")]
    api.worker.script = ["one", calls, "three", "four"]
    first = await ask(api, user("a"), system="s", tools=TOOLS, thread={"type": "create"})
    second = await ask(api, user("b"), thread=follow(first))
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "r"}
    third = await ask(api, {"role": "user", "content": [result]}, thread=follow(second))
    session = first.headers["kvrecall-session"]
    for answer in (second, third):
        assert answer.headers["kvrecall-match"] == "continued"
        assert answer.headers["kvrecall-session"] == session
    assert third.json()["content"] == [{"type": "text", "text": "three"}]
    said = [
        user("a"),
        {"role": "assistant", "content": "one"},
        user("b"),
        {"role": "assistant", "content": second.json()["content"]},
        {"role": "user", "content": [result]},
        {"role": "assistant", "content": "three"},
    ]
    whole = await ask(api, *said, user("d"), system="s", tools=TOOLS)
    assert whole.headers["kvrecall-match"] == "continued", "without a thread it is the same session"
    assert whole.headers["kvrecall-session"] == session


async def test_a_message_that_was_followed_before_is_followed_in_a_fork(api) -> None:
    first = await ask(api, user("a"))
    assert (await ask(api, user("b"), thread=follow(first))).headers["kvrecall-turn"] == "2"
    other = await ask(api, user("c"), thread=follow(first))
    assert other.headers["kvrecall-match"] == "forked"
    assert other.headers["kvrecall-turn"] == "2"
    again = await ask(api, user("d"), thread=follow(other))
    assert again.headers["kvrecall-session"] == other.headers["kvrecall-session"]


@pytest.mark.parametrize("other", ["unknown", "tenant", "turn", "digest", "deleted"])
async def test_a_message_that_is_not_there_is_a_thread_not_found(api, other: str) -> None:
    answer = await ask(api, user("a"), tenant="ann")
    id = answer.json()["id"]
    match other:
        case "unknown":
            id = "msg_1"
        case "turn":
            id = id.replace("_1_", "_2_")
        case "digest":
            id = id[:-1] + ("0" if id[-1] != "0" else "1")
        case "deleted":
            await api.service.delete(answer.headers["kvrecall-session"])
    tenant = "ben" if other == "tenant" else "ann"
    thread = {"type": "continue", "previous_message_id": id}
    response = await ask(api, user("b"), tenant=tenant, thread=thread)
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (404, "not_found_error")
    assert error["details"] == {"error_code": "thread_not_found"}


async def test_no_tenant_reaches_a_session_by_the_digest_in_anothers_id(api) -> None:
    api.worker.script = ["same", "same"]
    theirs = (await ask(api, user("secret"), tenant="ann")).json()["id"]
    mine = (await ask(api, user("a"), tenant="ben")).json()["id"]
    forged = mine[: mine.rindex("_")] + theirs[theirs.rindex("_") :]
    thread = {"type": "continue", "previous_message_id": forged}
    response = await ask(api, user("b"), tenant="ben", thread=thread)
    assert response.status_code == 404


async def test_a_thread_keeps_its_salt_which_each_of_its_requests_names(api) -> None:
    first = await ask(api, user("a"), cache_salt="ann")
    for members in ({"cache_salt": "ben"}, {}):
        refused = await ask(api, user("b"), thread=follow(first), **members)
        assert refused.status_code == 409
        assert refused.json()["error"]["message"].startswith("cache_salt: ")
    second = await ask(api, user("b"), thread=follow(first), cache_salt="ann")
    third = await ask(api, user("c"), thread=follow(second), kvrecall={"cache_salt": "ann"})
    for answer in (second, third):
        assert answer.headers["kvrecall-session"] == first.headers["kvrecall-session"]


@pytest.mark.parametrize(
    ("field", "value"),
    [("system", "other"), ("tools", TOOLS), ("kvrecall", {"budget": 64})],
)
async def test_what_a_thread_was_created_with_cannot_be_changed(
    api, field: str, value: Any
) -> None:
    first = await ask(api, user("a"))
    response = await ask(api, user("b"), thread=follow(first), **{field: value})
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["message"].startswith(f"{field}: ")
    assert error["details"] == {"error_code": "thread_fingerprint_mismatch"}
