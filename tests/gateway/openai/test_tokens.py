"""Tokens of texts and conversations, as clients of vLLM and of llama.cpp ask for them."""

from typing import Any

import pytest

HELLO = [{"role": "user", "content": "hello there"}]


async def test_a_prompt_as_vllm_has_it_and_back(api) -> None:
    body = {"model": api.service.info.model, "prompt": "hello there", "return_token_strs": True}
    answer = (await api.http.post("/tokenize", json=body)).json()
    assert answer["token_strs"] == ["<s>", "hello", "there"]
    assert answer["count"] == len(answer["tokens"]) == 3
    assert answer["max_model_len"] == api.service.info.max_context
    plain = (await api.http.post("/tokenize", json=body | {"add_special_tokens": False})).json()
    assert plain["tokens"] == answer["tokens"][1:]
    back = (await api.http.post("/detokenize", json={"tokens": plain["tokens"]})).json()
    assert back == {"prompt": "hello there", "content": "hello there"}


async def test_content_as_llama_cpp_has_it(api) -> None:
    body: dict[str, Any] = {"content": "hello there"}
    answer = (await api.http.post("/tokenize", json=body)).json()
    assert len(answer["tokens"]) == 2
    pieces = (await api.http.post("/tokenize", json=body | {"with_pieces": True})).json()
    assert [each["piece"] for each in pieces["tokens"]] == ["hello", "there"]
    special = (await api.http.post("/tokenize", json=body | {"add_special": True})).json()
    assert special["tokens"][1:] == answer["tokens"]


async def test_a_conversation_is_tokenized_through_the_template(api) -> None:
    answer = (await api.http.post("/tokenize", json={"messages": HELLO})).json()
    assert answer["count"] == 3
    assert answer["token_strs"] is None
    assert await api.catalog.sessions.get_ids() == []


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, "messages"),
        ("/tokenize", {"prompt": "a", "model": "gpt-9"}, "model"),
        ("/tokenize", {"messages": HELLO, "chat_template": "x"}, "chat_template"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ],
)
async def test_what_cannot_be_is_refused_in_openais_form(api, path: str, body, field: str) -> None:
    response = await api.http.post(path, json=body)
    assert response.status_code in (400, 404)
    assert response.json()["error"]["param"] == field
