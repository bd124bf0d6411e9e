"""Members of a request: each of OpenAI's is honoured, given back, named as left out, or refused."""

from typing import Any, get_type_hints

import pytest
from openai.types.responses.response_create_params import ResponseCreateParamsStreaming

from gateway.openai.responses.schemas import ResponseBody

Json = dict[str, Any]
# What asks for nothing that changes an answer, and has no effect.
SILENT: Json = {
    "service_tier": "flex",
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {"mode": "explicit", "ttl": "30m"},
    "stream_options": {"include_obfuscation": False},
    "client_metadata": {"a": "b"},
    "include": ["reasoning.encrypted_content", "web_search_call.results"],
    "max_tool_calls": 3,
}
NAMED: Json = {
    "access_programs": {"cyber": "standard"},
    "background_options": {"completion_window": "2h"},
    "context_management": [{"type": "compaction", "compact_threshold": 1000}],
    "image": {"context_compression": "auto"},
    "truncation": "auto",
    "stream_options": {"include_obfuscation": True},
    "unheard_of": 1,
}
REFUSED: Json = {"prompt": {"id": "p"}, "moderation": {"model": "m"}, "generate": False}


def test_each_of_openais_members_has_a_treatment() -> None:
    known = ResponseBody.model_fields.keys() | SILENT.keys() | NAMED.keys() | REFUSED.keys()
    assert get_type_hints(ResponseCreateParamsStreaming).keys() <= known


async def test_what_changes_nothing_is_taken_without_a_word(ask) -> None:
    response = await ask("hello", stream=True, **SILENT)
    assert response.status_code == 200
    assert "kvrecall-ignored" not in response.headers


@pytest.mark.parametrize(("name", "value"), NAMED.items())
async def test_what_is_left_out_is_named(ask, name: str, value: Any) -> None:
    response = await ask("hello", stream=True, **{name: value})
    assert response.status_code == 200
    assert response.headers["kvrecall-ignored"].startswith(name)


@pytest.mark.parametrize(("name", "value"), REFUSED.items())
async def test_what_would_be_another_answer_is_refused(ask, name: str, value: Any) -> None:
    response = await ask("hello", **{name: value})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, name)
    assert error["code"] == "unsupported_parameter"


async def test_left_out_tools_and_choices_are_named(ask) -> None:
    tools = [{"type": "web_search"}, {"type": "function", "name": "f", "parameters": {}}]
    response = await ask("hello", tools=tools, tool_choice={"type": "web_search"})
    assert response.headers["kvrecall-ignored"] == "tools[0] web_search, tool_choice"
