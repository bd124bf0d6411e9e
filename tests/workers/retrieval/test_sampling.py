"""The draw of rows by their weights: as many as asked for, as often as they weigh, and unbiased."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from workers.retrieval.sampling import Ranks, draw, take_best

WEIGHTS = st.lists(st.floats(0, 1, width=32), min_size=31, max_size=60)


def draw_by(weights: Tensor, count: int, rotation: int = 0) -> tuple[Tensor, Tensor]:
    """The draw with the ranks of some rotation."""
    heads, n = weights.shape
    return draw(weights, Ranks().rotated(heads, n, rotation), count)


@settings(deadline=None, max_examples=100)
@given(
    weights=WEIGHTS,
    count=st.integers(1, 30),
    gaps=st.sets(st.integers(0, 59)),
    rotation=st.integers(0, 100_000),
)
def test_rows_are_drawn_once_and_only_those_that_may_be(
    weights: list[float], count: int, gaps: set[int], rotation: int
) -> None:
    """Where rows with weight are few, all are drawn, and stand for themselves alone."""
    given_weights = [-1.0 if i in gaps else each for i, each in enumerate(weights)]
    indices, bias = draw_by(torch.tensor([given_weights]), count, rotation)
    drawn = [i for i in indices[0].tolist() if i >= 0]
    assert len(drawn) == len(set(drawn))
    some = [i for i, each in enumerate(given_weights) if each > 0]
    assert set(drawn) <= set(some)
    assert len(drawn) == min(count, len(some))
    assert torch.equal(indices < 0, bias.isneginf())
    if len(some) <= count:
        assert not bias[indices >= 0].any()


@settings(deadline=None, max_examples=50)
@given(
    seed=st.integers(0, 10_000),
    count=st.integers(1, 40),
    sharpness=st.floats(0, 6),
    rotation=st.integers(0, 100_000),
)
def test_drawn_rows_stand_for_the_weight_of_all(
    seed: int, count: int, sharpness: float, rotation: int
) -> None:
    """The sum of drawn weights over their shares, the softmax's denominator, is the whole sum."""
    random = torch.Generator().manual_seed(seed)
    weights = (sharpness * torch.randn(3, 500, generator=random)).softmax(1)
    indices, bias = draw_by(weights, count, rotation)
    stood_for = (weights.gather(1, indices) * bias.exp()).sum(1)
    assert torch.allclose(stood_for, torch.ones(3), atol=1e-4)


def test_what_rows_say_is_the_same_as_that_of_all_rows_over_many_draws() -> None:
    random = torch.Generator().manual_seed(1)
    weights = (2 * torch.randn(1, 2000, generator=random)).softmax(1)
    values = torch.randn(2000, generator=random)
    estimates = []
    for rotation in range(600):
        indices, bias = draw_by(weights, 50, rotation)
        estimates.append(((weights.gather(1, indices) * bias.exp())[0] * values[indices[0]]).sum())
    found, exact = torch.stack(estimates), (weights[0] * values).sum()
    assert abs(float(found.mean() - exact)) < 0.1 * float(found.std())
    # As far from it as independent draws by weight would be, at most.
    spread = ((weights[0] * (values - exact).square()).sum() / 50).sqrt()
    assert float(found.std()) < float(spread)


def test_a_row_is_drawn_as_often_as_its_weight_says() -> None:
    random = torch.Generator().manual_seed(1)
    weights = torch.rand(1, 400, generator=random)
    hits = torch.zeros(400)
    for rotation in range(1000):
        indices, _ = draw_by(weights, 20, rotation)
        hits[indices[0]] += 1
    expected = 1000 * 20 * weights[0] / weights.sum()
    assert float((hits - expected).abs().mean()) < 0.2 * float(expected.mean())


def test_each_head_has_ranks_of_its_own() -> None:
    weights = torch.ones(4, 300)
    indices, _ = draw_by(weights, 20)
    assert len({tuple(sorted(head)) for head in indices.tolist()}) == 4


def test_the_largest_weight_is_always_drawn_for_itself() -> None:
    weights = torch.full((1, 100), 0.001)
    weights[0, 37] = 0.9
    for rotation in range(100):
        indices, bias = draw_by(weights, 10, rotation)
        assert 37 in indices[0].tolist()
        assert float(bias[0, indices[0].tolist().index(37)]) == 0.0
        others = bias[indices != 37]
        assert torch.allclose(others, torch.tensor(99 / 9).log().expand_as(others), atol=1e-4)


def test_rows_without_weight_are_not_drawn() -> None:
    weights = torch.zeros(1, 300)
    assert bool((draw_by(weights, 30)[0] == -1).all())
    weights[0, 11] = 1.0
    indices, bias = draw_by(weights, 30)
    assert indices[indices >= 0].tolist() == [11]
    assert float(bias[indices == 11]) == 0.0


def test_ranks_stay_the_same_when_there_are_more_positions() -> None:
    ranks = Ranks()
    few = ranks.rotated(2, 100, 7).clone()
    assert torch.equal(ranks.rotated(2, 9000, 7)[:, :100], few)
    assert bool((few > 1).all())


def test_the_best_rows_stand_for_themselves() -> None:
    indices, bias = take_best(torch.tensor([[0.1, -1.0, 0.7, 0.2]]), 5)
    assert indices.tolist() == [[2, 3, 0, -1]]
    assert bias.tolist() == [[0.0, 0.0, 0.0, -torch.inf]]
