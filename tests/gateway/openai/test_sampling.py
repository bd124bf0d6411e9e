"""Sampling parameters as other servers' clients write them: what is none, and ends of answers."""

from dataclasses import replace
from typing import Any

import pytest

from gateway.openai.completions.schemas import CompletionBody
from gateway.openai.schemas import ChatCompletionBody
from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.messages import Sampling
from kvrecall.domain.turn_request import TurnRequest

HELLO = [{"role": "user", "content": "hello"}]
LIMITS = ServiceLimits(default_max_tokens=50, max_output_tokens=100)


def read(**body: Any) -> tuple[TurnRequest, Sampling]:
    """The turn of a chat completion, and its sampling."""
    parsed = ChatCompletionBody.model_validate({"model": "m", "messages": HELLO, **body})
    turn = parsed.turn_to_domain(LIMITS, Sampling(50))
    assert turn.sampling is not None
    return turn, turn.sampling


def test_minus_one_is_the_same_as_absent() -> None:
    odd = {"max_tokens": -1, "max_completion_tokens": -1, "top_k": -1, "seed": -1}
    assert read(**odd) == read()


def test_a_share_of_zero_leaves_the_likeliest_token() -> None:
    assert 0 < read(top_p=0)[1].top_p < 1e-5


def test_answers_end_where_the_request_says() -> None:
    _, sampling = read(stop_token_ids=[5, 6], min_tokens=3, max_tokens=9, stop="END")
    assert (sampling.stop_token_ids, sampling.min_tokens) == ((5, 6), 3)
    assert sampling.stop == ("END",)
    assert read(ignore_eos=True, max_tokens=9)[1].min_tokens == 9
    assert read(stop=[str(number) for number in range(20)])[1].stop[-1] == "19"
    assert read(stop="")[1].stop == ()


def test_they_are_the_same_in_completions() -> None:
    body = CompletionBody.model_validate(
        {"model": "m", "prompt": "a", "max_tokens": 9, "ignore_eos": True, "top_k": -1, "seed": -1}
    )
    turn = body.turn_to_domain(LIMITS, Sampling(50))
    chat = read(max_tokens=9, ignore_eos=True)[0]
    assert turn == replace(chat, sampling=turn.sampling)
    assert turn.sampling == chat.sampling


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        ({"min_tokens": 9, "max_tokens": 5}, "min_tokens", "over the limit of 5 tokens"),
        ({"stop": [str(number) for number in range(200)]}, "stop", "at most 128 items"),
        ({"stop": 3}, "stop", "valid list"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": -2}, "max_tokens", "greater than or equal to 1"),
        ({"use_beam_search": True}, "use_beam_search", "not supported"),
        ({"bad_words": ["x"]}, "bad_words", "not supported"),
        ({"prompt_logprobs": 1}, "prompt_logprobs", "not supported"),
        ({"truncate_prompt_tokens": 100}, "truncate_prompt_tokens", "not supported"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(api: Any, body, field: str, words: str) -> None:
    asked = {"model": api.service.info.model, "messages": HELLO, **body}
    response = await api.http.post("/v1/chat/completions", json=asked)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, field)
    assert words in error["message"]
