"""Defaults of sampling: the operator's values in place of the model's."""

from dataclasses import replace
from typing import Any

import pytest

from kvrecall.domain.answer.sampling_defaults import SamplingDefaults
from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.messages import Sampling
from kvrecall.protocol.convert import worker_info_from_wire
from kvrecall.protocol.v1 import worker_pb2

MODEL = SamplingDefaults(0.5, 0.75, 20, 0.25, 1.5)
INFO = replace(worker_info_from_wire(worker_pb2.WorkerInfo()), max_context=4096, sampling=MODEL)


def test_the_operator_replaces_the_values_that_are_set() -> None:
    assert ServiceLimits(default_max_tokens=9).build_sampling(INFO) == Sampling(
        9, 0.5, 0.75, 20, min_p=0.25, repetition_penalty=1.5
    )
    chosen = ServiceLimits(
        default_max_tokens=9, default_temperature=0.25, default_repetition_penalty=1
    )
    assert chosen.build_sampling(INFO) == Sampling(9, 0.25, 0.75, 20, min_p=0.25)
    greedy = ServiceLimits(default_max_tokens=9, default_temperature=0)
    assert greedy.build_sampling(INFO) == Sampling(9)


@pytest.mark.parametrize(
    ("limits", "length"),
    [
        (ServiceLimits(), 4096),
        (ServiceLimits(max_output_tokens=100), 100),
        (ServiceLimits(max_output_tokens=5000), 4096),
        (ServiceLimits(default_max_tokens=9, max_output_tokens=100), 9),
    ],
)
def test_an_answer_ends_where_the_context_does_unless_the_operator_says_otherwise(
    limits: ServiceLimits, length: int
) -> None:
    assert limits.build_sampling(INFO).max_tokens == length


def test_a_default_over_the_operator_s_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="default_max_tokens is over max_output_tokens, 8"):
        ServiceLimits(default_max_tokens=9, max_output_tokens=8)


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
