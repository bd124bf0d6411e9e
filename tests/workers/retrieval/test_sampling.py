"""The draw of rows by their weights: as many as asked for, each with its chance, and unbiased."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.retrieval.sampling import draw, take_best

WEIGHTS = st.lists(st.floats(0, 1, width=32), min_size=1, max_size=60)


@settings(deadline=None, max_examples=100)
@given(weights=WEIGHTS, count=st.integers(1, 30), gaps=st.sets(st.integers(0, 59)))
def test_rows_are_drawn_once_in_the_order_of_their_positions(
    weights: list[float], count: int, gaps: set[int]
) -> None:
    """And only those that may be; a row that is certain stands for itself alone."""
    given_weights = [-1.0 if i in gaps else each for i, each in enumerate(weights)]
    indices, bias = draw(torch.tensor([given_weights]), count)
    drawn = [i for i in indices[0].tolist() if i >= 0]
    assert drawn == sorted(set(drawn))
    assert not set(drawn) & gaps
    assert len(drawn) <= count
    assert torch.equal(indices < 0, bias.isneginf())
    assert bool((bias[indices >= 0] >= 0).all())


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 10_000), count=st.integers(1, 40), sharpness=st.floats(0, 6))
def test_drawn_rows_stand_for_the_weight_of_all(seed: int, count: int, sharpness: float) -> None:
    """The sum of drawn weights over their chances, the softmax's denominator, is the whole sum."""
    random = torch.Generator().manual_seed(seed)
    weights = (sharpness * torch.randn(3, 500, generator=random)).softmax(1)
    indices, bias = draw(weights, count)
    stood_for = (weights.gather(1, indices.clamp(min=0)) * bias.exp()).sum(1)
    certain = (bias == 0).sum(1)
    # As exact as whole draws can be: by one of those that are not certain.
    one = 1 / (count - certain).clamp(min=1).double()
    assert bool(((stood_for - 1).abs() <= one + 1e-3).all())


def test_a_row_is_drawn_as_often_as_its_chance_says() -> None:
    """Over all shifts of the weights the draw of a fixed offset is one at random."""
    random = torch.Generator().manual_seed(1)
    weights = torch.rand(400, generator=random)
    weights /= weights.sum()
    hits = torch.zeros(400)
    for shift in range(400):
        indices, _ = draw(weights.roll(shift)[None], 20)
        hits[(indices[0] - shift) % 400] += 1
    expected = 400 * 20 * weights
    assert float((hits - expected).abs().mean()) < 0.2 * float(expected.mean())


def test_the_largest_weight_is_always_drawn_for_itself() -> None:
    weights = torch.full((1, 100), 0.001)
    weights[0, 37] = 0.9
    indices, bias = draw(weights, 10)
    assert 37 in indices[0].tolist()
    assert float(bias[0, indices[0].tolist().index(37)]) == 0.0
    others = bias[indices != 37]
    assert torch.allclose(others, torch.tensor(99 / 9).log().expand_as(others), atol=1e-4)


def test_rows_whose_weights_underflow_can_be_drawn() -> None:
    indices, bias = draw(torch.zeros(1, 50), 5)
    assert (indices >= 0).sum() == 5
    assert bool(bias.isfinite().all())


def test_a_row_that_has_all_the_weight_leaves_the_other_draws_to_the_rest() -> None:
    weights = torch.zeros(1, 300)
    weights[0, 11] = 1.0
    indices, bias = draw(weights, 30)
    assert (indices >= 0).sum() == 30
    assert float(bias[indices == 11]) == 0.0
    assert torch.allclose(bias[indices != 11], torch.tensor(299 / 29).log(), atol=0.01)


def test_the_best_rows_stand_for_themselves() -> None:
    indices, bias = take_best(torch.tensor([[0.1, -1.0, 0.7, 0.2]]), 5)
    assert indices.tolist() == [[2, 3, 0, -1]]
    assert bias.tolist() == [[0.0, 0.0, 0.0, -torch.inf]]
