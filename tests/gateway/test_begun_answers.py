"""Answers that the client begins: what is given back, what the session holds, and what is refused."""

from typing import Any

import pytest

Json = dict[str, Any]
ASKED: Json = {"role": "user", "content": "Which password is it?"}
BEGUN: Json = {"role": "assistant", "content": "The password is"}
CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"


def build(api: Any, path: str, messages: list[Json], **body: Any) -> Json:
    begun = {"continue_final_message": True} if path == CHAT and messages[-1] == BEGUN else {}
    return {"model": api.service.info.model, "messages": messages, "max_tokens": 9, **begun, **body}


def text_of(answer: Json) -> str:
    if "choices" in answer:
        return str(answer["choices"][0]["message"]["content"])
    return str(answer["content"][0]["text"])


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_what_follows_is_given_back_and_the_whole_message_is_held(api, path: str) -> None:
    api.worker.script = ["winter comet.", "next"]
    first = await api.http.post(path, json=build(api, path, [ASKED, BEGUN]))
    assert text_of(first.json()) == "winter comet."
    whole = {"role": "assistant", "content": "The password iswinter comet."}
    second = await api.http.post(path, json=build(api, path, [ASKED, whole, ASKED]))
    assert second.headers["kvrecall-match"] == "continued"
    assert second.headers["kvrecall-session"] == first.headers["kvrecall-session"]


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_a_stream_and_its_repetition_have_what_follows_alone(api, path: str) -> None:
    api.worker.script = ["winter comet."]
    body = build(api, path, [ASKED, BEGUN], stream=True)
    key = {"Idempotency-Key": "one"}
    streamed = (await api.http.post(path, json=body, headers=key)).text
    again = (await api.http.post(path, json=body, headers=key)).text
    for text in (streamed, again):
        assert "winter" in text
        assert "The password" not in text


async def test_its_tokens_are_counted(api: Any) -> None:
    body = build(api, MESSAGES, [ASKED, BEGUN])
    counted = await api.http.post(f"{MESSAGES}/count_tokens", json=body)
    assert counted.json() == {"input_tokens": 5}


FORM = {"response_format": {"type": "json_object"}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        ({"add_generation_prompt": True}, "add_generation_prompt", "excludes it"),
        (FORM, "messages[1]", "has a form"),
        ({"messages": [ASKED]}, "messages[0]", "a text of the assistant"),
        (
            {"messages": [ASKED, {"role": "assistant", "tool_calls": [CALL]}]},
            "messages[1]",
            "without calls",
        ),
        (
            {"continue_final_message": None, "add_generation_prompt": False},
            "add_generation_prompt",
            "needs it",
        ),
    ],
)
async def test_what_cannot_be_begun_is_refused(api, body: Json, field: str, words: str) -> None:
    asked = build(api, CHAT, [ASKED, BEGUN]) | body
    error = (await api.http.post(CHAT, json=asked)).json()["error"]
    assert error["param"] == field
    assert words in error["message"]
    assert await api.catalog.sessions.get_ids() == []


async def test_a_beginning_does_not_end_with_white_space_as_anthropic_has_it(api: Any) -> None:
    begun = {**BEGUN, "content": "The password is "}
    response = await api.http.post(MESSAGES, json=build(api, MESSAGES, [ASKED, begun]))
    assert response.status_code == 400
    assert "cannot end with trailing whitespace" in response.json()["error"]["message"]
