"""The next token: greedy, or drawn from what temperature, top-k and top-p leave."""

from typing import Any

import pytest
import torch

from kvrecall.domain.messages import Sampling
from workers.errors import BadSettings
from workers.generation.sampling import Sampler, require_valid

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])


def _draws(count: int = 400, **settings: Any) -> list[int]:
    sampler = Sampler(Sampling(**settings))
    return [sampler.next_token(LOGITS, 0) for _ in range(count)]


def test_greedy_takes_the_maximum() -> None:
    assert _draws(5) == [0] * 5


def test_a_seed_gives_the_same_tokens_whenever_it_is_used() -> None:
    assert _draws(temperature=1.0, seed=4) == _draws(temperature=1.0, seed=4)
    assert _draws(temperature=1.0, seed=4) != _draws(temperature=1.0, seed=5)


def test_two_samplers_do_not_disturb_each_other() -> None:
    one, two = (Sampler(Sampling(temperature=1.0, seed=seed)) for seed in (4, 9))
    mixed = []
    for _ in range(50):
        mixed.append(one.next_token(LOGITS, 0))
        two.next_token(LOGITS, 0)
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
    ("settings", "field"),
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
def test_settings_out_of_range_are_refused_by_name(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(BadSettings, match=field):
        require_valid(Sampling(**settings))


def test_the_defaults_are_valid_and_off() -> None:
    sampling = Sampling()
    require_valid(sampling)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.stop) == (0, 1, 0, ())


def test_the_largest_seed_of_the_wire_is_one() -> None:
    assert len(_draws(3, temperature=1.0, seed=2**64 - 1)) == 3
