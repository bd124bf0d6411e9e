"""A conversation that is longer than the model's context: refused as clients know it, before a stream."""

from typing import Any

import httpx
import pytest

from gateway.http.settings import GatewaySettings
from kvrecall.domain.limits import ServiceLimits

Json = dict[str, Any]
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
DOORS = pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
WORDS = {
    CHAT: "This model's maximum context length is {limit} tokens. However, your messages resulted in "
    "{tokens} tokens.",
    MESSAGES: "prompt is too long: {tokens} tokens > {limit} maximum",
}
WORDS[RESPONSES] = WORDS[CHAT]


@pytest.fixture
def gateway_settings() -> GatewaySettings:
    return GatewaySettings()


@pytest.fixture
def service_settings() -> ServiceLimits:
    return ServiceLimits(default_max_tokens=50)


async def ask(api: Any, path: str, *texts: str, **members: Any) -> httpx.Response:
    said = [
        {"role": "assistant" if index % 2 else "user", "content": text}
        for index, text in enumerate(texts)
    ]
    body = {"model": api.service.info.model, "input" if path == RESPONSES else "messages": said}
    body |= {"max_tokens": 9} if path == MESSAGES else {}
    response: httpx.Response = await api.http.post(path, json=body | members)
    return response


def require_overflow(response: httpx.Response, path: str, tokens: int, limit: int) -> None:
    error = response.json()["error"]
    assert response.status_code == 400, response.text
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(WORDS[path].format(tokens=tokens, limit=limit))
    if path != MESSAGES:
        assert error["code"] == "context_length_exceeded"
    assert response.headers["x-should-retry"] == "false"


@DOORS
@pytest.mark.parametrize("stream", [False, True])
async def test_a_first_turn_over_the_context_is_refused_and_leaves_no_session(
    api, path: str, stream: bool
) -> None:
    api.worker.context = 20
    response = await ask(api, path, "word " * 40, stream=stream)
    if path == RESPONSES and stream:
        assert response.status_code == 200  # as OpenAI's: Codex reads it in the stream
        assert '"code": "context_length_exceeded"' in response.text
        assert response.text.count("event: ") == 3
        assert "event: response.failed" in response.text
    else:
        require_overflow(response, path, 41, 20)
    assert await api.catalog.sessions.get_ids() == []


@DOORS
async def test_a_later_turn_over_the_context_is_refused_and_the_session_stays(api, path) -> None:
    api.worker.context = 20
    first = await ask(api, path, "hello there")
    assert first.status_code == 200
    response = await ask(api, path, "hello there", "ok", "word " * 40)
    require_overflow(response, path, 45, 20)
    assert await api.catalog.sessions.get_ids() == [first.headers["kvrecall-session"]]
    again = await ask(api, path, "hello there", "ok", "short")
    assert again.headers["kvrecall-match"] == "continued"


@DOORS
async def test_a_long_history_is_counted_before_any_of_it_is_computed(api, path) -> None:
    limit = api.service.info.max_context
    texts = ["word " * 500, "ok"] * 10 + ["go on"]
    response = await ask(api, path, *texts)
    assert response.status_code == 400, response.text
    assert f"{limit} " in response.json()["error"]["message"]
    assert api.worker.call_log == []
    assert await api.catalog.sessions.get_ids() == []


@DOORS
async def test_more_bytes_than_a_turn_may_bring_are_an_overflow_too(api, path) -> None:
    response = await ask(api, path, "word " * (api.service.limits.max_turn_bytes // 5 + 1))
    limit = api.service.info.max_context
    require_overflow(response, path, api.service.limits.max_turn_bytes // 4 + 1, limit)
    assert await api.catalog.sessions.get_ids() == []


async def test_a_stream_of_a_session_is_refused_before_it_begins(api) -> None:
    api.worker.context = 20
    session = await api.session()
    response = await api.turn(session, "word " * 40, stream=True)
    assert (response.status_code, response.json()["code"]) == (413, "turn_too_long")
    assert (response.json()["tokens"], response.json()["limit"]) == (41, 20)
