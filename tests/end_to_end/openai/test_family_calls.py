"""Calls that a model of gpt-oss' and of DeepSeek's form is made to write, over the OpenAI API."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.end_to_end.byte_models import save_byte_model
from tests.end_to_end.openai.family_templates import (
    DEEPSEEK,
    DEEPSEEK_ADDED,
    DEEPSEEK_END,
    DEEPSEEK_MARKS,
    GPT_OSS,
)
from tests.end_to_end.servers import Json, Server
from tests.workers.byte_level import make_byte_level
from tests.workers.model.architectures.latent import LATENTS
from tests.workers.model.architectures.windows import WINDOWED
from tests.workers.model.thinking import HARMONY_END, HARMONY_MARKS

CITIES, UNITS = ("Oslo", "Bergen"), ("C", "F")
PARAMETERS: Json = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": CITIES},
        "unit": {"type": "string", "enum": UNITS},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": name, "description": f"The {name}.", "parameters": PARAMETERS},
    }
    for name in ("weather", "tides")
]
TIDES: Json = {"type": "function", "function": {"name": "tides"}}
RESULT = '{"high": "06:12"}'
BYTES = 256
FORCED: Json = {str(ord("a") - ord("!")): -100, str(BYTES): -100}
"""No `analysis`, which has no end here, and no end of turn where `<|call|>` ends it as well."""
WRITTEN = {
    "harmony": "<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
    "{arguments}<|call|><|start|>functions.{name} to=assistant<|channel|>commentary<|message|>{result}"
    "<|end|><|start|>assistant",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
    "<｜tool▁output▁begin｜>{result}<｜tool▁output▁end｜>",
}
"""A call and its result in the session, with the marks of each form."""


@pytest.fixture(scope="module", params=list(WRITTEN))
def form(request: pytest.FixtureRequest) -> str:
    """The form of the model's calls."""
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def server(
    form: str, new_server: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server of a tiny model with its family's own template."""
    folder = tmp_path_factory.mktemp("model") / form
    server = new_server(KVRECALL_MODEL=str(save(form, folder)))
    server.start()
    yield server
    server.kill()


def save(form: str, folder: Path) -> Path:
    if form == "harmony":
        inner = make_byte_level(GPT_OSS, HARMONY_END, HARMONY_MARKS)
        return save_byte_model(WINDOWED["gpt_oss"], inner, folder, "<|call|>")
    inner = make_byte_level(DEEPSEEK, DEEPSEEK_END, DEEPSEEK_MARKS, DEEPSEEK_ADDED)
    return save_byte_model(LATENTS["deepseek_v3"], inner, folder)


def ask(client: OpenAI, messages: list[Any], **options: Any) -> Any:
    """Send a conversation; returns the raw response."""
    (model,) = client.models.list().data
    return client.chat.completions.with_raw_response.create(
        model=model.id, messages=messages, tools=TOOLS, temperature=0, **options
    )


def read(response: Any, stream: bool) -> Json:
    """Return the message of an answer, put together from its chunks if it is streamed, and its end."""
    if not stream:
        choice = response.parse().choices[0]
        message = choice.message.model_dump(exclude_none=True, include={"content", "tool_calls"})
        return {"role": "assistant", **message, "end": choice.finish_reason}
    calls: list[Json] = []
    content, end = "", ""
    for chunk in response.parse():
        choice = chunk.choices[0]
        content += choice.delta.content or ""
        end = choice.finish_reason or end
        for piece in choice.delta.tool_calls or ():
            if piece.id:
                function = {"name": piece.function.name, "arguments": ""}
                calls.append({"id": piece.id, "type": "function", "function": function})
            calls[piece.index]["function"]["arguments"] += piece.function.arguments or ""
    return {"role": "assistant", "content": content, "tool_calls": calls, "end": end}


def read_text(server: Server, session: str) -> str:
    """Return the text of a session's tokens, marks included."""
    texts: list[str] = []
    while len(texts) < (part := server.own.inspect.memory_tokens(session, len(texts))).log_length:
        texts += [token.text for token in part.tokens]
    return "".join(texts)


def drop_space(text: str) -> str:
    """Drop white space: what was generated between the members of a call stays in the session."""
    return "".join(text.split())


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("choice", ["required", TIDES], ids=["any", "named"])
def test_a_call_is_written_and_its_result_goes_on(
    server: Server, form: str, openai: OpenAI, choice: Any, stream: bool
) -> None:
    messages: list[Any] = [{"role": "user", "content": f"When is it high? {choice} {stream}"}]
    options: Json = {"tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 300}
    first = ask(openai, messages, stream=stream, logit_bias=FORCED, **options)
    answer = read(first, stream)
    assert answer.pop("end") == "tool_calls"
    assert not (answer.get("content") or "").strip()
    (call,) = answer["tool_calls"]
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    assert name in ({"tides"} if choice == TIDES else {"weather", "tides"})
    given = json.loads(arguments)
    assert given["city"] in CITIES
    assert given["unit"] in UNITS
    messages += [answer, {"role": "tool", "tool_call_id": call["id"], "content": RESULT}]
    second = ask(openai, messages, stream=stream, tool_choice="none", max_tokens=8)
    assert read(second, stream)["end"] in ("length", "stop")
    assert second.headers["kvrecall-match"] == "continued"
    session = second.headers["kvrecall-session"]
    assert session == first.headers["kvrecall-session"]
    assert server.own.get_session(session).turns == 2
    written = WRITTEN[form].format(name=name, arguments=arguments, result=RESULT)
    assert drop_space(written) in drop_space(read_text(server, session))
