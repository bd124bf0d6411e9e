"""Several answers to one chat completion: plain, streamed, and which of them goes on."""

import asyncio
import json
from typing import Any

import pytest

from kvrecall.domain.errors import WorkerLost
from kvrecall.domain.limits import ServiceLimits

Json = dict[str, Any]
HELLO = [{"role": "user", "content": "hello there"}]


@pytest.fixture
def service_settings() -> ServiceLimits:
    return ServiceLimits(queue_seconds=5, default_max_tokens=50, tenant_sessions=8)


def read(response: Any) -> list[Json]:
    """The chunks of a stream, which ends with [DONE]."""
    lines = [line for line in response.text.split("\n") if line and not line.startswith(":")]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def ask(api: Any, messages: list[Json], **body: Any) -> Any:
    body = {"model": api.service.info.model, "messages": messages, **body}
    return await api.http.post("/v1/chat/completions", json=body)


async def test_each_choice_has_its_number_and_the_usage_counts_the_prompt_once(api) -> None:
    api.worker.script = ["one", "two words", "three whole words"]
    answer = (await ask(api, HELLO, n=3)).json()
    choices = answer["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    texts = {choice["message"]["content"] for choice in choices}
    assert texts == {"one", "two words", "three whole words"}
    api.worker.script = ["one"]
    single = (await ask(api, HELLO)).json()["usage"]
    usage = answer["usage"]
    assert usage["prompt_tokens"] == single["prompt_tokens"]
    assert usage["completion_tokens"] == 6
    assert usage["total_tokens"] == usage["prompt_tokens"] + 6


@pytest.mark.parametrize("include_usage", [False, True])
async def test_streamed_choices_come_by_their_numbers(api, include_usage: bool) -> None:
    api.worker.script = ["one", "two words"]
    options = {"stream_options": {"include_usage": include_usage}}
    pieces = read(await ask(api, HELLO, n=2, stream=True, **options))
    texts: dict[int, str] = {}
    for piece in pieces:
        for choice in piece["choices"]:
            texts.setdefault(choice["index"], "")
            texts[choice["index"]] += choice["delta"].get("content", "")
    assert {text.strip() for text in texts.values()} == {"one", "two words"}
    ends = [
        choice["finish_reason"]
        for piece in pieces
        for choice in piece["choices"]
        if choice["finish_reason"]
    ]
    assert ends == ["stop", "stop"]
    usage = pieces[-1].get("usage")
    assert (usage and usage["completion_tokens"]) == (3 if include_usage else None)


async def test_the_choice_that_is_echoed_goes_on(api) -> None:
    api.worker.script = ["one", "two", "fine"]
    first = await ask(api, HELLO, n=2)
    chosen = first.json()["choices"][1]["message"]
    second = await ask(api, [*HELLO, chosen, {"role": "user", "content": "and you"}])
    assert second.headers["kvrecall-match"] == "continued"
    assert second.headers["kvrecall-session"] != first.headers["kvrecall-session"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_choice_that_fails_fails_all_and_leaves_no_session(api, stream: bool) -> None:
    api.worker.faults["turn"] = WorkerLost("gone")
    response = await ask(api, HELLO, n=2, stream=stream)
    if stream:
        assert response.text.count('"error"') == 1
        assert "[DONE]" not in response.text
    else:
        assert (response.status_code, response.json()["error"]["type"]) == (503, "server_error")
    assert await api.catalog.sessions.get_ids() == []


async def test_choices_beyond_the_quota_are_refused_and_leave_nothing(api) -> None:
    for _ in range(7):
        await api.session()
    before = await api.catalog.sessions.get_ids()
    api.worker.gates["token"] = gate = asyncio.Event()
    response = await ask(api, HELLO, n=2)
    gate.set()
    assert (response.status_code, response.json()["error"]["code"]) == (429, "insufficient_quota")
    assert await api.catalog.sessions.get_ids() == before
    assert (await ask(api, HELLO)).status_code == 200
