"""Completions of plain prompts are what OpenAI's own types and client say, plain and streamed."""

from typing import Any

import pytest
from openai import AsyncOpenAI
from openai.types import Completion

from tests.gateway.vendors.answers import ANSWERS, Answer, answer_with
from tests.gateway.vendors.vendor_types import Json, check, read_events

PATH = "/v1/completions"
PROMPT = "once upon"
# A prompt has no tools and no reasoning.
TEXTS = {
    name: answer for name, answer in ANSWERS.items() if not answer.calls and not answer.reasoning
}
EVERY = pytest.mark.parametrize("answer", TEXTS.values(), ids=list(TEXTS))
ECHO = pytest.mark.parametrize("echo", [False, True])
COUNT = pytest.mark.parametrize("count", [1, 2])


def build(api: Any, answer: Answer, **members: Any) -> Json:
    """Build the request whose answer this is."""
    body: Json = {"model": api.service.info.model, "prompt": PROMPT, **members}
    if answer.logprobs:
        body["logprobs"] = 2
    if answer.stop:
        body["stop"] = [answer.stop]
    return body


async def read_plain(api: Any, answer: Answer, **members: Any) -> Completion:
    response = await api.http.post(PATH, json=build(api, answer, **members))
    assert response.status_code == 200, response.text
    found: Completion = check(Completion, response.json())
    return found


def check_usage(usage: Any, answer: Answer, count: int) -> None:
    """Check the counts: the prompt's once, and those of all answers."""
    assert (usage.prompt_tokens, usage.completion_tokens) == (3, answer.tokens * count)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def check_logprobs(logprobs: Any, text: str) -> None:
    """Check that the lists are parallel, and that each token has its place in the text."""
    places = logprobs.text_offset
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(places)
    assert len(logprobs.top_logprobs) == len(places)
    assert places == sorted(places)
    assert all(0 <= place <= len(text) for place in places)
    for token, own, top in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert (own is None) == (top is None)
        assert top is None or top[token] == own


@EVERY
@ECHO
@COUNT
async def test_an_answer_is_a_completion(api: Any, answer: Answer, echo: bool, count: int) -> None:
    answer_with(api.worker, answer)
    found = await read_plain(api, answer, echo=echo, n=count)
    assert found.id.startswith("cmpl-")
    assert [choice.index for choice in found.choices] == list(range(count))
    for choice in found.choices:
        assert choice.text == (PROMPT if echo else "") + answer.text.rstrip()
        assert choice.finish_reason == answer.finish
        assert (choice.logprobs is not None) == answer.logprobs
        if choice.logprobs is not None:
            check_logprobs(choice.logprobs, choice.text)
    check_usage(found.usage, answer, count)


@EVERY
@ECHO
@COUNT
async def test_a_stream_is_completions_that_add_up_to_the_answer(
    api: Any, answer: Answer, echo: bool, count: int
) -> None:
    if answer.logprobs and echo:
        return  # refused: the prompt's own come with a whole answer
    answer_with(api.worker, answer)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    body = build(api, answer, echo=echo, n=count, **options)
    response = await api.http.post(PATH, json=body)
    assert response.text.endswith("data: [DONE]\n\n")
    chunks = [check(Completion, data) for _, data in read_events(response.text)]
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    *pieces, last = chunks
    assert last.choices == []
    check_usage(last.usage, answer, count)
    assert all(chunk.usage is None and len(chunk.choices) == 1 for chunk in pieces)
    for number in range(count):
        own = [chunk.choices[0] for chunk in pieces if chunk.choices[0].index == number]
        check_choice(own, answer, PROMPT if echo else "")


@EVERY
@COUNT
async def test_each_chunk_has_the_counts_so_far_where_they_are_asked_for(
    api: Any, answer: Answer, count: int
) -> None:
    answer_with(api.worker, answer)
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = build(api, answer, stream=True, stream_options=options, n=count)
    read = read_events((await api.http.post(PATH, json=body)).text)
    *pieces, last = [check(Completion, data) for _, data in read]
    for number in range(count):
        usages = [chunk.usage for chunk in pieces if chunk.choices[0].index == number]
        made = [usage.completion_tokens for usage in usages]
        assert made == sorted(made)
        assert made[-2:-1] == ([answer.tokens] if answer.text else [])
        check_usage(usages[-1], answer, 1)
    check_usage(last.usage, answer, count)


def check_choice(choices: list[Any], answer: Answer, opening: str) -> None:
    """Check the pieces of one answer: what they add up to, and that the last one alone ends it."""
    *rest, end = choices
    text = "".join(choice.text for choice in choices)
    assert text.startswith(opening)
    assert text.removeprefix(opening).rstrip() == answer.text.rstrip()
    assert (end.text, end.finish_reason) == ("", answer.finish)
    assert all(choice.finish_reason is None and choice.text for choice in rest)
    reported = [choice.logprobs for choice in choices if choice.logprobs is not None]
    assert bool(reported) == answer.logprobs
    for logprobs in reported:
        check_logprobs(logprobs, text)


@EVERY
async def test_openais_client_reads_the_same_text_from_a_stream(
    api: Any, answer: Answer, openai: AsyncOpenAI
) -> None:
    answer_with(api.worker, answer)
    body = build(api, answer)
    plain = await openai.completions.create(**body)
    pieces = [each async for each in await openai.completions.create(**body, stream=True)]
    text = "".join(choice.text for each in pieces for choice in each.choices)
    assert text.rstrip() == plain.choices[0].text == answer.text.rstrip()
    assert pieces[-1].choices[0].finish_reason == plain.choices[0].finish_reason


@pytest.mark.parametrize("length", [0, 5])
async def test_a_prompt_that_is_scored_has_null_in_its_first_place(api: Any, length: int) -> None:
    if length:
        answer_with(api.worker, ANSWERS["logprobs"])
    found = await read_plain(api, ANSWERS["logprobs"], echo=True, max_tokens=length)
    (choice,) = found.choices
    assert choice.logprobs is not None
    check_logprobs(choice.logprobs, choice.text)
    scored: Any = choice.logprobs.token_logprobs
    assert scored[0] is None
    assert None not in scored[1:]
    assert choice.text.startswith(PROMPT)


async def test_each_prompt_of_several_has_its_answers(api: Any) -> None:
    answer = ANSWERS["plain"]
    answer_with(api.worker, answer)
    found = await read_plain(api, answer, prompt=["one", "two"], n=2, echo=True)
    assert [choice.index for choice in found.choices] == list(range(4))
    openings = [choice.text.removesuffix(answer.text) for choice in found.choices]
    assert openings == ["one", "one", "two", "two"]
