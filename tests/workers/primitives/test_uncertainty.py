"""Where no token is doubtful, every score within the bounds leads to the same choice."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from workers.methods import RepairKV

FORMS = [
    RepairKV(before=1, after=3),
    RepairKV(select="bursts", before=1, after=3),
    RepairKV(select="bursts", after=0),
]


@st.composite
def bounded(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, int]:
    """Bounds on the scores of up to 30 tokens, tight or wide, the candidates among them, and how many are wanted."""
    n = draw(st.integers(1, 30))
    middle = torch.tensor(draw(st.lists(st.integers(0, 40), min_size=n, max_size=n))) / 10
    slack = torch.tensor(draw(st.lists(st.sampled_from([0.0, 0.01, 0.3]), min_size=n, max_size=n)))
    candidates = torch.tensor(draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    return (middle - slack).clamp(min=0), middle + slack, candidates, draw(st.integers(0, 12))


@pytest.mark.parametrize("form", FORMS, ids=["spread", "bursts", "anchors alone"])
@given(case=bounded(), data=st.data())
def test_without_a_doubt_the_choice_is_the_same_whatever_the_scores_are(
    form: RepairKV, case: tuple[Tensor, Tensor, Tensor, int], data: st.DataObject
) -> None:
    lower, upper, candidates, count = case
    if bool(form.ambiguous_tokens(lower, upper, candidates, count).any()):
        return
    ties = torch.zeros(len(lower))
    chosen = form.choose(form.utility(lower), candidates, ties, count)
    for _ in range(3):
        share = torch.tensor(
            data.draw(st.lists(st.floats(0, 1), min_size=len(lower), max_size=len(lower)))
        )
        between = lower + (upper - lower) * share
        assert (
            form.choose(form.utility(between), candidates, ties, count).tolist() == chosen.tolist()
        )


@pytest.mark.parametrize("form", FORMS, ids=["spread", "bursts", "anchors alone"])
@given(case=bounded())
def test_scores_that_are_known_leave_no_doubt(
    form: RepairKV, case: tuple[Tensor, Tensor, Tensor, int]
) -> None:
    lower, _, candidates, count = case
    assert not bool(form.ambiguous_tokens(lower, lower.clone(), candidates, count).any())


@pytest.mark.parametrize("form", FORMS, ids=["spread", "bursts", "anchors alone"])
@given(case=bounded())
def test_only_tokens_whose_score_is_not_known_are_doubtful(
    form: RepairKV, case: tuple[Tensor, Tensor, Tensor, int]
) -> None:
    lower, upper, candidates, count = case
    assert not bool(
        (form.ambiguous_tokens(lower, upper, candidates, count) & (lower == upper)).any()
    )


def test_a_rival_that_may_be_better_is_doubtful() -> None:
    lower = torch.tensor([0.1, 0.5, 0.1, 0.1, 0.4])
    upper = torch.tensor([0.1, 0.6, 0.1, 0.1, 0.55])
    everyone = torch.ones(5, dtype=torch.bool)
    for form in (RepairKV(before=0, after=0), RepairKV(select="bursts", before=0, after=0)):
        assert form.ambiguous_tokens(lower, upper, everyone, 1).tolist() == [
            False,
            True,
            False,
            False,
            True,
        ]
        assert not form.ambiguous_tokens(lower, upper, everyone, 5).any(), (
            "all of them are chosen anyway"
        )
