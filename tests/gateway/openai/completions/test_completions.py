"""Completions of plain prompts: their forms, echo, log-probabilities, streams, and what is left of them."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from openai.types import Completion

from kvrecall.domain.errors import WorkerLost
from kvrecall.domain.limits import ServiceLimits

Json = dict[str, Any]
PATH = "/v1/completions"


@pytest.fixture
def service_settings() -> ServiceLimits:
    return ServiceLimits(queue_seconds=5, default_max_tokens=50, max_output_tokens=100)


async def ask(api: Any, prompt: Any, **body: Any) -> Any:
    return await api.http.post(
        PATH, json={"model": api.service.info.model, "prompt": prompt, **body}
    )


def read(response: Any) -> list[Json]:
    """The chunks of a stream, each as OpenAI's client has it, which ends with [DONE]."""
    lines = [line for line in response.text.split("\n") if line and not line.startswith(":")]
    assert lines.pop() == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    for chunk in chunks:
        # A piece's reason is null, as OpenAI's API has it: its client's type knows whole answers.
        choices = [
            {**each, "finish_reason": each["finish_reason"] or "stop"} for each in chunk["choices"]
        ]
        Completion.model_validate({**chunk, "choices": choices})
    return chunks


async def ids_of(api: Any, text: str) -> list[int]:
    return list(await api.service.tokenize_text(text, True))


@pytest.mark.parametrize("form", ["text", "texts", "tokens", "lists of tokens"])
async def test_a_prompt_in_any_form_is_the_same(api, form: str) -> None:
    tokens = await ids_of(api, "once upon")
    prompt = {
        "text": "once upon",
        "texts": ["once upon"],
        "tokens": tokens,
        "lists of tokens": [tokens],
    }[form]
    api.worker.script = ["a time"]
    response = await ask(api, prompt, temperature=0)
    answer = Completion.model_validate(response.json())
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert [choice.text for choice in answer.choices] == ["a time"]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 2)
    assert await api.catalog.sessions.get_ids() == []


async def test_each_prompt_has_its_answers_in_order(api) -> None:
    api.worker.script = [f"answer {number}" for number in range(6)]
    answer = (await ask(api, ["one", "two", "three"], n=2, echo=True)).json()
    texts = [choice["text"] for choice in answer["choices"]]
    assert [text.partition("answer")[0] for text in texts] == ["one", "one", "two", "two"] + [
        "three"
    ] * 2
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert answer["usage"]["prompt_tokens"] == 6, "each prompt once"
    assert answer["usage"]["completion_tokens"] == 12
    assert await api.catalog.sessions.get_ids() == []


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_the_prompt_is_scored_with_echo(api, max_tokens: int) -> None:
    body = {"echo": True, "max_tokens": max_tokens, "logprobs": 1, "temperature": 0}
    answer = (await ask(api, "once upon", **body)).json()
    choice = answer["choices"][0]
    # The first one is null, as OpenAI's API has it, though its client's type says number.
    assert choice["text"] == "once upon" + ("ok" if max_tokens else "")
    assert choice["logprobs"]["token_logprobs"][:3] == [None, -0.5, -0.5]
    assert choice["logprobs"]["top_logprobs"][:3] == [None, {"w": -0.5}, {"w": -0.5}]
    assert choice["finish_reason"] == ("stop" if max_tokens else "length")
    assert answer["usage"]["completion_tokens"] == max_tokens


@pytest.mark.parametrize(("echo", "texts"), [(False, "a time"), (True, "once upona time")])
async def test_a_stream_adds_up_to_the_answer(api, echo: bool, texts: str) -> None:
    api.worker.script = ["a time"]
    options = {"stream_options": {"include_usage": True}}
    chunks = read(await ask(api, "once upon", stream=True, echo=echo, **options))
    said = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(choice["text"] for choice in said).strip() == texts
    assert [choice["finish_reason"] for choice in said if choice["finish_reason"]] == ["stop"]
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["usage"]["total_tokens"] == 5
    assert await api.catalog.sessions.get_ids() == []


async def test_answers_run_beside_each_other_as_far_as_there_are_slots(api) -> None:
    api.worker.gates["token"] = asyncio.Event()
    asked = asyncio.create_task(ask(api, [str(number) for number in range(9)]))
    await api.worker.reached["token"].wait()
    await asyncio.sleep(0)
    assert api.worker.open_turns <= api.service.info.slots
    api.worker.gates["token"].set()
    assert len((await asked).json()["choices"]) == 9


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_leaves_nothing(api, stream: bool) -> None:
    api.worker.faults["token"] = WorkerLost("gone")
    api.worker.faults["open"] = WorkerLost("gone")
    await ask(api, ["one", "two"], stream=stream)
    assert await api.catalog.sessions.get_ids() == []


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        ({"prompt": []}, "prompt", "no prompt"),
        ({"prompt": [1, "two"]}, "prompt", "a prompt is a text"),
        ({"prompt": [[1], "two"]}, "prompt", "a prompt is a text"),
        ({"prompt": [True]}, "prompt", "a prompt is a text"),
        ({"prompt": [[]]}, "prompt", "has no token"),
        ({"prompt": ["a"] * 129}, "prompt", "over the limit of 128"),
        ({"prompt": "a", "suffix": "z"}, "suffix", "not supported"),
        ({"prompt": "a", "best_of": 3}, "best_of", "has to be n"),
        ({"prompt": "a", "kvrecall": {"session": "s_1"}}, "kvrecall.session", "of its own"),
        ({"prompt": "a", "echo": True, "logprobs": 1, "stream": True}, "stream", "whole answer"),
        ({"prompt": "a b c d"}, "prompt", "your messages resulted in 5 tokens"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(api, body: Json, field: str, words: str) -> None:
    api.service._info = replace(api.service.info, max_context=5, max_session_tokens=5)
    response = await api.http.post(PATH, json={"model": api.service.info.model, **body})
    error = response.json()["error"]
    assert 400 <= response.status_code < 500
    assert error["param"] == field
    assert words in error["message"]
    assert await api.catalog.sessions.get_ids() == []


async def test_a_long_prompt_is_cut_to_its_last_tokens(api) -> None:
    body = {"echo": True, "truncate_prompt_tokens": 2}
    answer = (await ask(api, "one two three", **body)).json()
    assert answer["usage"]["prompt_tokens"] == 2
    api.service._info = replace(api.service.info, max_context=20)
    body = {"truncate_prompt_tokens": -1, "max_tokens": 8}
    answer = (await ask(api, "a " * 50, **body)).json()
    assert answer["usage"]["prompt_tokens"] == 12


@pytest.mark.parametrize(("max_tokens", "wanted"), [(None, 16), (-1, 100), (7, 7)])
async def test_the_length_is_openais_unless_it_is_named(api, max_tokens, wanted: int) -> None:
    api.worker.script = ["word " * 200]
    answer = (await ask(api, "one", max_tokens=max_tokens)).json()
    assert answer["usage"]["completion_tokens"] == wanted
    assert answer["choices"][0]["finish_reason"] == "length"
