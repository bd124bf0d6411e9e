"""Salts in the APIs of stateless clients: read at every door, never shown, and no other's session."""

from typing import Any

import httpx
import pytest

Json = dict[str, Any]
PROMPT = "you are a kind and helpful friend of many words"
KIND: Json = {"role": "system", "content": PROMPT}
HELLO: Json = {"role": "user", "content": "hello there"}
CHAT: Json = {"messages": [KIND, HELLO]}
DOORS: dict[str, Json] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "hello there"},
    "/v1/responses": {"instructions": PROMPT, "input": "hello there"},
    "/v1/messages": {"system": PROMPT, "messages": [HELLO], "max_tokens": 20},
}
ALL = pytest.mark.parametrize("path", DOORS)
SHARING = pytest.mark.parametrize("path", [path for path in DOORS if path != "/v1/completions"])


async def ask(api: Any, path: str, headers: Json | None = None, **members: Any) -> httpx.Response:
    body = {"model": api.service.info.model, **DOORS[path], **members}
    answer: httpx.Response = await api.http.post(path, json=body, headers=headers or {})
    return answer


def get_cached(answer: httpx.Response) -> int:
    """The tokens of a prompt that were not computed."""
    usage = answer.json()["usage"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or usage
    return int(details.get("cached_tokens", details.get("cache_read_input_tokens")))


def find_field(answer: httpx.Response) -> str:
    """The field at fault; Anthropic's errors begin their messages with it."""
    error: Json = answer.json()["error"]
    return str(error.get("param") or error["message"].partition(":")[0])


@SHARING
async def test_pages_are_cached_for_the_same_salt_alone(api, path: str) -> None:
    answers = [await ask(api, path, cache_salt=salt) for salt in ("ann", "ben", None, "ann")]
    assert [answer.status_code for answer in answers] == [200] * 4
    assert [get_cached(answer) for answer in answers] == [0, 0, 0, 12]
    assert "kvrecall-ignored" not in answers[0].headers


@ALL
@pytest.mark.parametrize(
    ("members", "field"),
    [
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "s" * 257}, "cache_salt"),
        ({"cache_salt": 7}, "cache_salt"),
        ({"kvrecall": {"cache_salt": ""}}, "kvrecall.cache_salt"),
        ({"cache_salt": "a", "kvrecall": {"cache_salt": "b"}}, "cache_salt"),
    ],
)
async def test_a_salt_that_is_none_is_refused_with_its_field(
    api, path: str, members: Json, field: str
) -> None:
    answer = await ask(api, path, **members)
    assert (answer.status_code, find_field(answer)) == (400, field)
    assert await api.catalog.sessions.get_ids() == []


@SHARING
async def test_a_salt_is_the_same_in_each_of_its_places(api, path: str) -> None:
    header = {"kvrecall-cache-salt": "zebra"}
    member: Json = {"kvrecall": {"cache_salt": "zebra"}}
    places: list[tuple[Json, Json]] = [
        ({}, {"cache_salt": "zebra"}),
        ({}, member),
        (header, {}),
        (header, {"cache_salt": "zebra", **member}),
    ]
    for headers, members in places:
        answer = await ask(api, path, headers, **members)
        session, _ = await api.service.get(answer.headers["kvrecall-session"])
        assert session.settings.cache_salt == "zebra"
        assert "zebra" not in answer.text + str(answer.headers)
    assert get_cached(answer) == 12


@ALL
@pytest.mark.parametrize("members", [{"cache_salt": "ann"}, {"kvrecall": {"cache_salt": "ann"}}])
async def test_a_header_does_not_change_the_salt_of_the_body(api, path: str, members: Json) -> None:
    answer = await ask(api, path, {"kvrecall-cache-salt": "ben"}, **members)
    assert (answer.status_code, find_field(answer)) == (400, "cache_salt")
    empty = await ask(api, path, {"kvrecall-cache-salt": ""})
    assert (empty.status_code, find_field(empty)) == (400, "kvrecall-cache-salt")


async def test_a_conversation_goes_on_with_its_own_salt_alone(api) -> None:
    path = "/v1/chat/completions"
    first = await ask(api, path, cache_salt="ann")
    said = [*CHAT["messages"], first.json()["choices"][0]["message"], HELLO]
    other = await ask(api, path, messages=said, cache_salt="ben")
    same = await ask(api, path, messages=said, cache_salt="ann")
    assert other.headers["kvrecall-match"] == "built"
    assert same.headers["kvrecall-match"] == "continued"
    assert same.headers["kvrecall-session"] == first.headers["kvrecall-session"]


@pytest.mark.parametrize("headers", [{}, {"kvrecall-cache-salt": "ann"}])
async def test_a_session_that_is_named_is_compared_with_the_salt(api, headers: Json) -> None:
    path = "/v1/chat/completions"
    session = await api.session(cache_salt="ann")
    named = {"kvrecall-session": session, "kvrecall-history": "new"}
    refused = await ask(api, path, named, cache_salt="ben")
    assert (refused.status_code, find_field(refused)) == (409, "cache_salt")
    assert (await ask(api, path, named | headers)).status_code == 200


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/responses/compact"])
async def test_a_response_is_followed_with_its_own_salt_alone(api, path: str) -> None:
    first = await ask(api, "/v1/responses", cache_salt="ann")
    body = {"model": api.service.info.model, "input": "more"}
    follows = {**body, "previous_response_id": first.json()["id"]}
    for members in ({"cache_salt": "ben"}, {}):
        refused = await api.http.post(path, json={**follows, **members})
        assert (refused.status_code, find_field(refused)) == (409, "cache_salt")
        assert refused.json()["error"]["code"] == "session_mismatch"
    followed = await api.http.post(path, json={**follows, "cache_salt": "ann"})
    assert followed.status_code == 200


async def test_tokens_of_a_response_are_counted_for_its_own_salt_alone(api) -> None:
    first = await ask(api, "/v1/responses", cache_salt="ann")
    model = api.service.info.model
    body = {"model": model, "input": "more", "previous_response_id": first.json()["id"]}
    path = "/v1/responses/input_tokens"
    assert (await api.http.post(path, json=body)).status_code == 409
    headers = {"kvrecall-cache-salt": "ann"}
    assert (await api.http.post(path, json=body, headers=headers)).status_code == 200
