"""The next token: greedy, or drawn from what temperature, top-k and top-p leave."""

import math
import random
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvrecall.domain.messages import Sampling
from workers.errors import BadSettings
from workers.generation.sampling import Sampler, require_valid, sample

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])


def _draws(count: int = 400, **values: Any) -> list[int]:
    sampler = Sampler(Sampling(**values))
    return [sample(LOGITS[None], [sampler])[0] for _ in range(count)]


def test_greedy_takes_the_maximum() -> None:
    assert _draws(5) == [0] * 5


def test_a_seed_gives_the_same_tokens_whenever_it_is_used() -> None:
    assert _draws(temperature=1.0, seed=4) == _draws(temperature=1.0, seed=4)
    assert _draws(temperature=1.0, seed=4) != _draws(temperature=1.0, seed=5)


def test_two_samplers_do_not_disturb_each_other() -> None:
    one, two = (Sampler(Sampling(temperature=1.0, seed=seed)) for seed in (4, 9))
    mixed = []
    for _ in range(50):
        mixed.append(sample(LOGITS[None], [one])[0])
        sample(LOGITS[None], [two])
        torch.rand(3)
    assert mixed == _draws(50, temperature=1.0, seed=4)


@pytest.mark.parametrize("k", [1, 2, 4, 100])
def test_top_k_leaves_the_k_likeliest(k: int) -> None:
    assert set(_draws(temperature=2.0, top_k=k)) == set(range(min(k, 6)))


@pytest.mark.parametrize("p", [0.1, 0.6, 0.9])
def test_top_p_leaves_the_least_tokens_that_hold_p(p: float) -> None:
    kept = 0
    mass = 0.0
    while mass < p:
        mass += float(LOGITS.softmax(-1)[kept])
        kept += 1
    assert set(_draws(temperature=1.0, top_p=p)) == set(range(kept))


def test_temperature_sharpens_and_flattens() -> None:
    cold, warm, hot = (_draws(temperature=t).count(0) for t in (0.3, 1.0, 5.0))
    assert cold > warm > hot


def test_tokens_are_sampled_with_their_probabilities() -> None:
    draws = torch.tensor(_draws(4000, temperature=1.0)).bincount(minlength=6) / 4000
    assert torch.allclose(draws, LOGITS.softmax(-1), atol=0.03)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 101}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"stop": ("ok", "")}, "stop"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(values: dict[str, Any], field: str) -> None:
    with pytest.raises(BadSettings, match=field):
        require_valid(Sampling(**values), 1280)


def test_the_defaults_are_valid_and_off() -> None:
    sampling = Sampling()
    require_valid(sampling, 1280)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.stop) == (0, 1, 0, ())


def test_the_largest_seed_of_the_wire_is_one() -> None:
    assert len(_draws(3, temperature=1.0, seed=2**64 - 1)) == 3


# In a batch


def _random_sampling(rng: random.Random, seed: int) -> Sampling:
    return Sampling(
        temperature=rng.choice([0.0, 0.3, 1.0, 1.7]),
        top_k=rng.choice([0, 1, 3, 40, 1000]),
        top_p=rng.choice([0.2, 0.7, 0.95, 1.0]),
        seed=seed,
    )


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32))
def test_a_token_does_not_depend_on_the_rest_of_the_batch(seed: int) -> None:
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    samplings = [_random_sampling(rng, seed + i) for i in range(rng.randint(1, 9))]
    logits = torch.randn(4, len(samplings), 50, generator=generator) * 3
    together = [Sampler(each) for each in samplings]
    batches = [sample(step, together) for step in logits]
    for row, sampling in enumerate(samplings):
        alone = Sampler(sampling)
        tokens = [sample(step[row : row + 1], [alone])[0] for step in logits]
        assert tokens == [batch[row] for batch in batches]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32))
def test_what_may_be_sampled_is_what_transformers_leaves(seed: int) -> None:
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    sampling = replace(_random_sampling(rng, seed), temperature=rng.choice([0.3, 1.0, 1.7]))
    logits = torch.randn(1, 50, generator=generator) * 3
    warpers = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    no_history = cast("torch.LongTensor", torch.empty(1, 0, dtype=torch.long))
    left = warpers(no_history, cast("torch.FloatTensor", logits.clone())).softmax(-1)[0]
    samplers = [Sampler(replace(sampling, seed=draw)) for draw in range(300)]
    tokens = sample(logits.expand(300, -1), samplers)
    assert all(left[token] > 0 for token in tokens)
    likeliest = int(left.argmax())
    assert abs(tokens.count(likeliest) / 300 - float(left[likeliest])) < 0.15


def test_a_large_vocabulary_keeps_its_unlikely_tokens() -> None:
    """Half of the probability is spread over 150,000 tokens, each under float32's resolution of 1."""
    logits = torch.zeros(1, 150_001)
    logits[0, 0] = math.log(150_000)
    samplers = [Sampler(Sampling(temperature=1.0, seed=seed)) for seed in range(200)]
    tokens = sample(logits.expand(200, -1), samplers)
    assert 60 < tokens.count(0) < 140
    assert len(set(tokens)) > 50


def test_a_batch_of_greedy_sessions_draws_nothing() -> None:
    sampler = Sampler(Sampling(seed=3))
    assert sample(LOGITS.expand(2, -1), [sampler, sampler]) == [0, 0]
    assert sampler.draw() == Sampler(Sampling(seed=3)).draw()


@pytest.mark.parametrize("temperature", [5e-324, 1e-40, 1e-38, 1e-6])
def test_a_temperature_under_the_bound_is_greedy(temperature: float) -> None:
    assert _draws(20, temperature=temperature) == [0] * 20


def test_the_least_temperature_that_samples_is_finite() -> None:
    logits = torch.tensor([[1e4, 1e4, -1e4]])
    samplers = [Sampler(Sampling(temperature=1e-5, seed=seed)) for seed in range(50)]
    assert set(sample(logits.expand(50, -1), samplers)) == {0, 1}
