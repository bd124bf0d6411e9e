"""Penalties, bias, min_p and log-probabilities act on each session's row alone."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvrecall.domain.messages import Sampling
from workers.errors import BadSettings
from workers.generation.sampling import Sampler, require_valid, sample

LOGITS = torch.tensor([2.0, 1.5, 1.0, -1.0, -2.0])


def take(count: int, **values: Any) -> list[int]:
    """Sample from the same logits, each token counted."""
    sampler = Sampler(Sampling(**values))
    tokens = []
    for _ in range(count):
        (token,) = sample(LOGITS[None], [sampler])
        sampler.accept(token)
        tokens.append(token)
    return tokens


def test_a_frequency_penalty_grows_with_every_repetition() -> None:
    assert take(6, frequency_penalty=0.4) == [0, 0, 1, 0, 1, 2]


def test_a_presence_penalty_counts_once() -> None:
    assert take(5, presence_penalty=0.8) == [0, 1, 0, 0, 0]


def test_a_repetition_penalty_divides_what_is_likely_and_multiplies_what_is_not() -> None:
    assert take(4, repetition_penalty=2.5) == [0, 1, 2, 0]
    sampler = Sampler(Sampling(repetition_penalty=2.0))
    sampler.accept(3)
    low = torch.tensor([-1.9, -5.0, -5.0, -1.0, -5.0])
    assert sample(low[None], [sampler]) == [0], "twice -1 is less than -1.9"


def test_a_bias_is_added() -> None:
    assert take(1, logit_bias=((4, 4.5),)) == [4]
    assert take(1, logit_bias=((0, -100.0), (1, -100.0))) == [2]


def test_min_p_excludes_what_is_far_less_likely_than_the_best() -> None:
    every = {take(1, temperature=1.0, seed=seed)[0] for seed in range(300)}
    near = {take(1, temperature=1.0, seed=seed, min_p=0.5)[0] for seed in range(300)}
    assert every == {0, 1, 2, 3, 4}
    assert near == {0, 1}
    assert math.exp(-0.5) > 0.5 > math.exp(-1.0)


def test_adjusted_rows_do_not_touch_their_neighbours() -> None:
    samplings = [
        Sampling(temperature=1.0, seed=1),
        Sampling(temperature=1.0, seed=2, frequency_penalty=1.0),
        Sampling(),
        Sampling(temperature=1.0, seed=4, min_p=0.3, logit_bias=((3, 2.0),), top_logprobs=2),
        Sampling(repetition_penalty=1.5, top_logprobs=0),
    ]
    torch.manual_seed(3)
    steps = torch.randn(12, len(samplings), 40)
    together = [Sampler(each) for each in samplings]
    batches = []
    for step in steps:
        kept = step.clone()
        tokens = sample(step, together)
        assert torch.equal(step, kept), "the logits are the caller's"
        for sampler, token in zip(together, tokens, strict=True):
            sampler.accept(token)
        batches.append(tokens)
    for row, each in enumerate(samplings):
        alone = Sampler(each)
        for step, tokens in zip(steps, batches, strict=True):
            assert sample(step[row : row + 1], [alone]) == [tokens[row]]
            alone.accept(tokens[row])
        assert alone.logprobs == together[row].logprobs


def test_logprobs_are_the_models_own() -> None:
    expected = LOGITS.log_softmax(-1).tolist()
    sampler = Sampler(Sampling(top_logprobs=2, logit_bias=((4, 50.0),), temperature=1.0))
    assert sample(LOGITS[None], [sampler]) == [4]
    assert sampler.logprobs is not None
    assert sampler.logprobs.logprob == pytest.approx(expected[4])
    assert [token for token, _ in sampler.logprobs.top] == [0, 1]
    assert [value for _, value in sampler.logprobs.top] == pytest.approx(expected[:2])
    none = Sampler(Sampling())
    sample(LOGITS[None], [none])
    assert none.logprobs is None


@pytest.mark.parametrize(
    "values",
    [
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
        {"top_logprobs": 21},
        {"frequency_penalty": math.inf},
        {"logit_bias": ((5, 1.0),)},
        {"logit_bias": ((1, math.nan),)},
    ],
)
def test_values_out_of_range_are_refused(values: dict[str, Any]) -> None:
    require_valid(Sampling(), 5)
    with pytest.raises(BadSettings):
        require_valid(replace(Sampling(), **values), 5)
