"""Token counts of answers: what the worker did not compute is cached, wherever it comes from."""

from typing import Any

Json = dict[str, Any]
KIND: Json = {"role": "system", "content": "you are a kind and helpful friend of many words"}


async def get_usage(api: Any, path: str, **body: Any) -> Json:
    answer = await api.http.post(path, json={"model": api.service.info.model, **body})
    usage: Json = answer.json()["usage"]
    return usage


async def test_pages_that_another_session_has_are_cached_tokens(api: Any) -> None:
    usages = []
    for text in ("hello there", "good morning"):
        messages = [KIND, {"role": "user", "content": text}]
        usages.append(await get_usage(api, "/v1/chat/completions", messages=messages))
    assert [each["prompt_tokens_details"]["cached_tokens"] for each in usages] == [0, 12]
    assert usages[0]["prompt_tokens"] == usages[1]["prompt_tokens"]
    response = await get_usage(
        api, "/v1/responses", instructions=KIND["content"], input="good evening"
    )
    assert response["input_tokens_details"]["cached_tokens"] == 12


async def test_a_history_that_is_told_at_once_is_all_computed(api: Any) -> None:
    said = [
        {"role": "user", "content": "a b c"},
        {"role": "assistant", "content": "d e"},
        {"role": "user", "content": "f"},
    ]
    usage = await get_usage(api, "/v1/chat/completions", messages=said)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert usage["prompt_tokens_details"]["cache_write_tokens"] == usage["prompt_tokens"]
