"""Wishes on reasoning become arguments of the chat template, where the served model's template reads them."""

import json
from typing import Any

import httpx
import pytest

Json = dict[str, Any]
HELLO: list[Json] = [{"role": "user", "content": "hello"}]
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
BODIES: dict[str, Json] = {
    CHAT: {"messages": HELLO},
    RESPONSES: {"input": "hello"},
    MESSAGES: {"messages": HELLO, "max_tokens": 20},
}
SWITCH, EFFORT, DEEPSEEK = "enable_thinking", "reasoning_effort", "thinking"


@pytest.fixture
def variables() -> list[str]:
    """What the template reads."""
    return [SWITCH, EFFORT]


@pytest.fixture(autouse=True)
def reads(assembled: Any, variables: list[str]) -> None:
    """Let the worker say so; before the application starts."""
    assembled.worker.template_variables = variables


async def ask(
    api: Any, path: str, headers: dict[str, str] | None = None, **members: Any
) -> httpx.Response:
    body = {"model": api.service.info.model, **BODIES[path], **members}
    answer: httpx.Response = await api.http.post(path, json=body, headers=headers or {})
    return answer


async def get_arguments(api: Any, answer: httpx.Response) -> Json:
    """Return the arguments of the session that has an answer, as its worker reads them."""
    assert answer.status_code == 200, answer.text
    spec = api.worker.specs[answer.headers["kvrecall-session"]]
    arguments: Json = json.loads(json.loads(spec.options)["template_arguments"])
    return arguments


@pytest.mark.parametrize("variables", [[SWITCH], [DEEPSEEK]], ids=str)
@pytest.mark.parametrize(
    ("path", "members", "on"),
    [
        (CHAT, {"reasoning_effort": "none"}, False),
        (CHAT, {"reasoning_effort": "low"}, True),
        (RESPONSES, {"reasoning": {"effort": "none"}}, False),
        (RESPONSES, {"reasoning": {"effort": "high", "summary": "auto"}}, True),
        (MESSAGES, {"thinking": {"type": "disabled"}}, False),
        (MESSAGES, {"thinking": {"type": "enabled"}}, True),
        (MESSAGES, {"thinking": {"type": "adaptive"}}, True),
        *((path, {"enable_thinking": on}, on) for path in BODIES for on in (True, False)),
        (MESSAGES, {"thinking": {"type": "enabled"}, "enable_thinking": False}, False),
        (CHAT, {"reasoning_effort": "high", "thinking": {"type": "disabled"}}, False),
    ],
)
async def test_a_wish_is_given_under_the_name_that_the_template_reads(
    api: Any, path: str, members: Json, on: bool, variables: list[str]
) -> None:
    answer = await ask(api, path, **members)
    assert await get_arguments(api, answer) == {variables[0]: on}
    assert "kvrecall-ignored" not in answer.headers


@pytest.mark.parametrize(
    ("path", "members", "arguments"),
    [
        (CHAT, {"reasoning_effort": "high"}, {EFFORT: "high", SWITCH: True}),
        (RESPONSES, {"reasoning": {"effort": "none"}}, {EFFORT: "none", SWITCH: False}),
        (MESSAGES, {"output_config": {"effort": "low"}}, {EFFORT: "low"}),
        (
            MESSAGES,
            {"output_config": {"effort": "low"}, "thinking": {"type": "disabled"}},
            {EFFORT: "low", SWITCH: False},
        ),
        (CHAT, {"reasoning_effort": None, "enable_thinking": None, "thinking": None}, {}),
    ],
)
async def test_an_effort_is_given_as_it_is(
    api: Any, path: str, members: Json, arguments: Json
) -> None:
    answer = await ask(api, path, **members)
    assert await get_arguments(api, answer) == arguments
    assert "kvrecall-ignored" not in answer.headers


@pytest.mark.parametrize("path", BODIES)
async def test_arguments_by_their_names_win(api: Any, path: str) -> None:
    given = {"chat_template_kwargs": {SWITCH: True, EFFORT: "max"}}
    nested = {"kvrecall": {"chat_template_kwargs": {EFFORT: "least"}}}
    for members, effort in ((given, "max"), ({**given, **nested}, "least")):
        answer = await ask(api, path, enable_thinking=False, **members)
        assert await get_arguments(api, answer) == {SWITCH: True, EFFORT: effort}


@pytest.mark.parametrize(
    ("path", "members", "named"),
    [
        (CHAT, {"reasoning_effort": "high"}, "reasoning_effort"),
        (RESPONSES, {"reasoning": {"effort": "high"}}, "reasoning.effort"),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        (MESSAGES, {"output_config": {"effort": "low"}}, "output_config.effort"),
        *((path, {"enable_thinking": False}, "enable_thinking") for path in BODIES),
    ],
)
@pytest.mark.parametrize("variables", [["date_string"]], ids=str)
async def test_what_the_template_does_not_read_is_named(
    api: Any, path: str, members: Json, named: str
) -> None:
    answer = await ask(api, path, **members)
    assert await get_arguments(api, answer) == {}
    assert answer.headers["kvrecall-ignored"] == named
    page = (await api.http.get("/metrics")).text
    assert f'kvrecall_ignored_members_total{{member="{named.split(".")[0]}"}} 1.0' in page


@pytest.mark.parametrize("path", BODIES)
async def test_an_argument_that_the_template_does_not_read_is_named_and_given(
    api: Any, path: str
) -> None:
    given = {"enable_thinkin": True, SWITCH: True}
    answer = await ask(api, path, chat_template_kwargs=given)
    assert await get_arguments(api, answer) == given
    assert answer.headers["kvrecall-ignored"] == "chat_template_kwargs.enable_thinkin"


async def test_a_bound_of_the_reasoning_is_not_kept_and_named(api: Any) -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}
    answer = await ask(api, MESSAGES, thinking=thinking)
    assert await get_arguments(api, answer) == {SWITCH: True}
    assert answer.headers["kvrecall-ignored"] == "thinking.budget_tokens, thinking.display"
    odd = await ask(api, MESSAGES, thinking={"type": "between_tools"})
    assert odd.headers["kvrecall-ignored"] == "thinking"


async def test_a_plain_prompt_has_no_template(api: Any) -> None:
    body = {"model": api.service.info.model, "prompt": "hello", "enable_thinking": False}
    answer = await api.http.post(
        "/v1/completions", json=body | {"chat_template_kwargs": {SWITCH: 1}}
    )
    assert answer.status_code == 200
    named = {"enable_thinking", f"chat_template_kwargs.{SWITCH}"}
    assert set(answer.headers["kvrecall-ignored"].split(", ")) == named


@pytest.mark.parametrize("path", BODIES)
async def test_only_a_session_with_the_same_arguments_is_continued(api: Any, path: str) -> None:
    first = await ask(api, path)
    content = first.json().get("content") or first.json().get("output", [{}])[0].get("content")
    text = content[0]["text"] if content else first.json()["choices"][0]["message"]["content"]
    follows = [*HELLO, {"role": "assistant", "content": text}, *HELLO]
    said: Json = {"input" if path == RESPONSES else "messages": follows}
    other = await ask(api, path, **said, enable_thinking=False)
    assert other.headers["kvrecall-match"] == "built"
    same = await ask(api, path, **said, chat_template_kwargs={})
    assert same.headers["kvrecall-match"] == "continued"
    assert same.headers["kvrecall-session"] == first.headers["kvrecall-session"]


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_a_named_session_keeps_its_own(api: Any, path: str) -> None:
    made = await api.http.post("/v1/sessions", json={"chat_template_kwargs": {SWITCH: True}})
    named = {"kvrecall-session": made.json()["id"]}
    wished = await ask(api, path, named, enable_thinking=False)
    assert await get_arguments(api, wished) == {SWITCH: True}
    assert wished.headers["kvrecall-ignored"] == "enable_thinking"
    refused = await ask(api, path, named, chat_template_kwargs={SWITCH: False})
    assert refused.status_code == 400
    assert "a session keeps the settings that it has" in refused.text
    assert "chat_template_kwargs" in refused.text


async def test_a_thread_keeps_what_it_was_created_with(api: Any) -> None:
    off = {"thinking": {"type": "disabled"}}
    first = await ask(api, MESSAGES, **off)
    follows = {"thread": {"type": "continue", "previous_message_id": first.json()["id"]}}
    second = await ask(api, MESSAGES, **follows, **off)
    assert second.headers["kvrecall-session"] == first.headers["kvrecall-session"]
    assert await get_arguments(api, second) == {SWITCH: False}
    assert second.headers["kvrecall-ignored"] == "thinking"
    refused = await ask(api, MESSAGES, **follows, chat_template_kwargs={SWITCH: True})
    assert refused.status_code == 400
    assert "chat_template_kwargs" in refused.json()["error"]["message"]


@pytest.mark.parametrize("path", [*BODIES, "/tokenize"])
async def test_what_the_request_gives_itself_is_refused(api: Any, path: str) -> None:
    body = {"model": api.service.info.model, **BODIES.get(path, {"messages": HELLO})}
    answer = await api.http.post(path, json=body | {"chat_template_kwargs": {"tools": []}})
    assert answer.status_code == 400
    assert "given by the request itself" in answer.text
    assert "chat_template_kwargs.tools" in answer.text
