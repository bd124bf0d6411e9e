"""Headers of requests for an answer and of answers, in the APIs that stateless clients speak."""

from typing import Any

import httpx
import pytest

from kvrecall.domain.limits import ServiceLimits

Json = dict[str, Any]
CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]})
RESPONSE = ("/v1/responses", {"input": "hello"})
MESSAGE = (
    "/v1/messages",
    {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 20},
)
APIS = pytest.mark.parametrize(("path", "body"), [CHAT, RESPONSE, MESSAGE])


async def ask(api: Any, path: str, body: Json, headers: Json, **members: Any) -> httpx.Response:
    own = {"model": api.service.info.model, **body, **members}
    answer: httpx.Response = await api.http.post(path, json=own, headers=headers)
    return answer


@APIS
async def test_headers_say_what_the_body_may_say_and_come_before_it(
    api, path: str, body: Json
) -> None:
    headers = {
        "kvrecall-budget": "96",
        "kvrecall-research": '{"method": "snapkv", "repair_on": ["tool_result", "turn"]}',
    }
    first = await ask(api, path, body, headers, kvrecall={"budget": 64, "seed": 3})
    session, _ = await api.service.get(first.headers["kvrecall-session"])
    settings = session.settings
    assert (settings.budget, settings.method, settings.seed) == (96, "snapkv", 3)
    assert {str(each) for each in settings.repair_on} == {"tool_result", "turn"}
    members = {
        "budget": 96,
        "seed": 3,
        "research": {"method": "snapkv", "repair_on": ["tool_result", "turn"]},
    }
    repeated = await ask(api, path, body, {}, kvrecall=members)
    assert repeated.status_code == 200


async def test_a_header_is_a_part_of_what_finds_the_session(api) -> None:
    path, body = CHAT
    off = {"kvrecall-recall": "false", "kvrecall-trim": "honour"}
    first = await ask(api, path, body, off)
    reply = first.json()["choices"][0]["message"]
    said: Json = {"messages": [*body["messages"], reply, {"role": "user", "content": "more"}]}
    matches = [await ask(api, path, said, headers) for headers in (off, {})]
    assert [each.headers["kvrecall-match"] for each in matches] == ["continued", "built"]
    session, _ = await api.service.get(first.headers["kvrecall-session"])
    assert (session.settings.recall, session.settings.method) == (False, "full")


@APIS
@pytest.mark.parametrize(
    "headers",
    [
        {"kvrecall-budget": "many"},
        {"kvrecall-budget": "0"},
        {"kvrecall-budget": "9" * 400},
        {"kvrecall-recall": "maybe"},
        {"kvrecall-research": "snapkv"},
        {"kvrecall-research": '["snapkv"]'},
        {"kvrecall-research": '{"method": 1}'},
        {"kvrecall-trim": "ignore"},
        {"kvrecall-retain": "some"},
        {"kvrecall-history": "old"},
        {"kvrecall-sesion": "none"},
    ],
)
async def test_a_header_that_cannot_be_honoured_is_refused_by_its_name(
    api, path: str, body: Json, headers: Json
) -> None:
    (name,) = headers
    answer = await ask(api, path, body, headers)
    assert answer.status_code == 400
    assert name in answer.text
    if path != MESSAGE[0]:
        assert answer.json()["error"]["param"] == name
    assert answer.headers["x-should-retry"] == "false"
    assert await api.catalog.sessions.get_ids() == []


@APIS
@pytest.mark.parametrize(
    "headers", [{"kvrecall-method": "full"}, {"kvrecall-repair": "off"}], ids=["method", "repair"]
)
async def test_a_header_of_an_earlier_version_is_told_the_one_of_today(
    api, path: str, body: Json, headers: Json
) -> None:
    answer = await ask(api, path, body, headers)
    assert answer.status_code == 400
    assert "kvrecall-research: {" in answer.json()["error"]["message"]


class TestWithShortAnswers:
    """A service whose answers have at most 16 tokens."""

    @pytest.fixture
    def service_settings(self) -> ServiceLimits:
        return ServiceLimits(max_output_tokens=16, default_max_tokens=16)

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize(
        ("api_of", "members", "clamped"),
        [
            (CHAT, {"max_tokens": 32_000}, "max_tokens"),
            (CHAT, {"max_tokens": 8, "max_completion_tokens": 17}, "max_completion_tokens"),
            (CHAT, {"max_tokens": 32_000, "max_completion_tokens": 16}, None),
            (CHAT, {}, None),
            (RESPONSE, {"max_output_tokens": 17}, "max_output_tokens"),
            (MESSAGE, {"max_tokens": 17}, "max_tokens"),
            (MESSAGE, {"max_tokens": 16}, None),
        ],
    )
    async def test_a_member_that_was_cut_is_told(
        self, api, api_of: tuple[str, Json], members: Json, clamped: str | None, stream: bool
    ) -> None:
        answer = await ask(api, *api_of, {}, **members, stream=stream)
        assert answer.status_code == 200
        assert answer.headers.get("kvrecall-clamped") == clamped


async def test_answers_of_openais_api_have_its_headers(api) -> None:
    answers = [
        await ask(api, *CHAT, {}),
        await ask(api, *CHAT, {}, stream=True),
        await ask(api, *CHAT, {}, n=2),
        await api.http.get("/v1/models"),
    ]
    for answer in answers:
        assert answer.headers["openai-version"] == "2020-10-01"
        assert int(answer.headers["openai-processing-ms"]) >= 0
    other = await api.http.get("/v1/sessions")
    assert "openai-version" not in other.headers


async def test_what_a_repeat_cannot_help_says_so(api) -> None:
    wrong = [
        await ask(api, *CHAT, {}, temperature=7),
        await ask(api, *RESPONSE, {}, previous_response_id="resp_0"),
        await api.http.get("/v1/responses/resp_0"),
        await api.http.get("/v1/sessions/s_0"),
        await api.http.put("/v1/models"),
    ]
    assert [each.headers.get("x-should-retry") for each in wrong] == ["false"] * 5


@APIS
async def test_members_that_nobody_knows_are_counted_by_name(api, path: str, body: Json) -> None:
    known = {"metadata": {"a": "b"}, "service_tier": "auto"}
    odd = {"top_a": True, "kvr-secret": 1, "Hello, I am Ann": 1, "cache_salt": None}
    for _ in range(2):
        answer = await ask(api, path, body, {}, **known, **odd)
        assert answer.headers["kvrecall-ignored"] == "top_a, kvr-secret, Hello? I am Ann"
    page = (await api.http.get("/metrics")).text
    lines = {line for line in page.splitlines() if line.startswith("kvrecall_ignored_members_t")}
    assert lines == {
        'kvrecall_ignored_members_total{member="top_a"} 2.0',
        'kvrecall_ignored_members_total{member="other"} 4.0',
    }


async def test_names_of_ignored_members_are_bounded(api) -> None:
    letters = "abcdefgh"
    names: Json = {
        f"{one}_{other}_{third}": 1 for one in letters for other in letters for third in "xy"
    }
    assert (await ask(api, *CHAT, {}, **names)).status_code == 200
    page = (await api.http.get("/metrics")).text
    lines = [line for line in page.splitlines() if line.startswith("kvrecall_ignored_members_t")]
    assert len(lines) == 65
    assert 'kvrecall_ignored_members_total{member="other"} 64.0' in lines
