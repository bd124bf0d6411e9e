"""If no token is ambiguous, all scores within the bounds lead to the same selection."""

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
    """Bounds on the scores of up to 30 tokens, the candidates, and the number to select."""
    n = draw(st.integers(1, 30))
    middle = torch.tensor(draw(st.lists(st.integers(0, 40), min_size=n, max_size=n))) / 10
    slack = torch.tensor(draw(st.lists(st.sampled_from([0.0, 0.01, 0.3]), min_size=n, max_size=n)))
    candidates = torch.tensor(draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    return (middle - slack).clamp(min=0), middle + slack, candidates, draw(st.integers(0, 12))


@pytest.mark.parametrize("form", FORMS, ids=["spread", "bursts", "anchors alone"])
@given(case=bounded(), data=st.data())
def test_without_ambiguous_tokens_all_scores_give_the_same_selection(
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
def test_exact_scores_leave_no_token_ambiguous(
    form: RepairKV, case: tuple[Tensor, Tensor, Tensor, int]
) -> None:
    lower, _, candidates, count = case
    assert not bool(form.ambiguous_tokens(lower, lower.clone(), candidates, count).any())


@pytest.mark.parametrize("form", FORMS, ids=["spread", "bursts", "anchors alone"])
@given(case=bounded())
def test_only_tokens_without_an_exact_score_are_ambiguous(
    form: RepairKV, case: tuple[Tensor, Tensor, Tensor, int]
) -> None:
    lower, upper, candidates, count = case
    assert not bool(
        (form.ambiguous_tokens(lower, upper, candidates, count) & (lower == upper)).any()
    )


def test_a_rival_that_may_be_better_is_ambiguous() -> None:
    lower = torch.tensor([0.1, 0.5, 0.1, 0.1, 0.4])
    upper = torch.tensor([0.1, 0.6, 0.1, 0.1, 0.55])
    all_tokens = torch.ones(5, dtype=torch.bool)
    for form in (RepairKV(before=0, after=0), RepairKV(select="bursts", before=0, after=0)):
        assert form.ambiguous_tokens(lower, upper, all_tokens, 1).tolist() == [
            False,
            True,
            False,
            False,
            True,
        ]
        assert not form.ambiguous_tokens(lower, upper, all_tokens, 5).any(), (
            "all of them are chosen anyway"
        )
