"""Defaults of sampling: the operator's values in place of the model's."""

from typing import Any

import pytest

from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.messages import Sampling
from kvrecall.domain.sampling_defaults import SamplingDefaults

MODEL = SamplingDefaults(0.5, 0.75, 20, 0.25, 1.5)


def test_the_operator_replaces_the_values_that_are_set() -> None:
    assert ServiceLimits(default_max_tokens=9).build_sampling(MODEL) == Sampling(
        9, 0.5, 0.75, 20, min_p=0.25, repetition_penalty=1.5
    )
    chosen = ServiceLimits(
        default_max_tokens=9, default_temperature=0.25, default_repetition_penalty=1
    )
    assert chosen.build_sampling(MODEL) == Sampling(9, 0.25, 0.75, 20, min_p=0.25)
    greedy = ServiceLimits(default_max_tokens=9, default_temperature=0)
    assert greedy.build_sampling(MODEL) == Sampling(9)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_k": -1},
        {"min_p": 1.1},
        {"repetition_penalty": 0.0},
    ],
)
def test_values_out_of_range_are_named(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=name):
        SamplingDefaults(**wrong)
