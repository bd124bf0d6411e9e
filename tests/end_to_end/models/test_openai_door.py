"""The OpenAI API of these models: common beginnings are computed once, and histories are sent again."""

from itertools import takewhile
from typing import Any

from tests.end_to_end.models.kinds import RECURRENT_KIND, STATE_EVERY
from tests.end_to_end.servers import Json, Server
from tests.workers.model.architectures.shapes import WINDOW

PAGE = 64
_WINDOWS = {"full attention": 2, f"window of {WINDOW} tokens": 2}
LAYERS = {
    RECURRENT_KIND: {"full attention": 2, "recurrent state": 2},
    "gpt_oss": _WINDOWS,
    "gemma3": _WINDOWS,
    "deepseek_v3": {"latent attention": 2},
}
"""The layers of each model, by what they keep."""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Look up a code.",
            "parameters": {"type": "object", "properties": {"name": {"type": "string"}}},
        },
    }
    for name in ("look_up", "call")
]


def get_model(server: Server) -> str:
    """Name of the model."""
    (model,) = server.http.get("/v1/models").raise_for_status().json()["data"]
    name: str = model["id"]
    return name


def complete(server: Server, messages: list[Json], **options: Any) -> Json:
    """Send a whole conversation; returns the response."""
    response = server.http.post(
        "/v1/chat/completions",
        json={
            "model": get_model(server),
            "messages": messages,
            "max_tokens": 12,
            "temperature": 0,
            "stop": ["<tool_call>"],
            **options,
        },
    )
    assert response.status_code == 200, response.text
    found: Json = response.json()
    return found | {"match": response.headers["kvrecall-match"]}


def get_cached(answer: Json) -> int:
    """Tokens of the prompt that were not computed."""
    cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def get_text(answer: Json) -> str:
    """Text of the answer."""
    text: str = answer["choices"][0]["message"]["content"]
    return text


def tokenize(server: Server, messages: list[Json]) -> list[int]:
    """Tokens of a prompt."""
    response = server.http.post(
        "/tokenize", json={"model": get_model(server), "messages": messages}
    )
    tokens: list[int] = response.raise_for_status().json()["tokens"]
    return tokens


def begin_conversation(say: Any, question: str) -> list[Json]:
    """A long system prompt, and a question."""
    return [{"role": "system", "content": say.chatter(70, 50)}, say.user(question)]


def test_a_model_says_what_its_layers_keep(kind: str, server: Server) -> None:
    (model,) = server.http.get("/v1/models").raise_for_status().json()["data"]
    one = server.http.get(f"/v1/models/{model['id']}").raise_for_status().json()
    worker = server.http.get("/v1/worker").raise_for_status().json()
    assert model["layer_kinds"] == one["layer_kinds"] == worker["layer_kinds"]
    assert {each["name"]: each["layers"] for each in model["layer_kinds"]} == LAYERS[kind]
    for each in model["layer_kinds"]:
        keeps_states = each["name"] == "recurrent state"
        assert bool(each["state_bytes"]) is keeps_states
        assert bool(each["token_bytes"]) is not keeps_states


def test_a_second_conversation_of_the_same_system_prompt(
    kind: str, server: Server, say: Any
) -> None:
    first = begin_conversation(say, "Who called?")
    second = begin_conversation(say, "What is the code of Ada's locker?")
    prompts = [tokenize(server, messages) for messages in (first, second)]
    pairs = zip(*prompts, strict=False)
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    assert common > 2 * STATE_EVERY
    assert get_cached(complete(server, first, cache_salt=kind)) == 0
    shared = complete(server, second, cache_salt=kind)
    alone = complete(server, second, cache_salt="alone")
    assert get_cached(alone) == 0
    assert get_text(shared) == get_text(alone)
    missing = STATE_EVERY if kind == RECURRENT_KIND else PAGE
    assert common - missing < get_cached(shared) <= common
    again = complete(server, first, cache_salt=kind)
    assert get_cached(again) >= get_cached(shared)


def test_a_history_with_calls_that_is_sent_again(kind: str, server: Server, say: Any) -> None:
    messages = begin_conversation(say, "Which code opens the locker of Ada?")
    options: Json = {"tools": TOOLS, "cache_salt": f"calls of {kind}"}
    cached = []
    for round_ in range(2):
        call = say.asks(f"c{round_}", name="Ada")
        call["tool_calls"][0]["type"] = "function"
        result = {"role": "tool", "tool_call_id": f"c{round_}", "content": say.chatter(round_, 12)}
        messages += [call, result]
        answer = complete(server, messages, **options)
        cached.append(get_cached(answer))
        messages.append({"role": "assistant", "content": get_text(answer)})
        messages.append(say.user(say.chatter(100 + round_, 6)))
        answer = complete(server, messages, **options)
        assert answer["match"] == "continued"
        cached.append(get_cached(answer))
        messages.append({"role": "assistant", "content": get_text(answer)})
    assert cached == sorted(cached)
    assert cached[0] == 0 < cached[1] < cached[-1]
    assert cached[-1] > answer["usage"]["prompt_tokens"] - 3 * PAGE
