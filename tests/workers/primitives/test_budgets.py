"""The split of a budget over the layers."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrecall.domain.settings.session import LayerBudgets
from workers.errors import BadSettings
from workers.primitives.budgets import get_alpha, share_within_groups, split_budget

WEIGHTS = st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 2.0)), min_size=1, max_size=40)
FLOORS = st.integers(0, 64)
EXTRA = st.integers(0, 2000)
ALPHAS = st.floats(0.1, 4.0)


@given(WEIGHTS, FLOORS, EXTRA, ALPHAS, st.sampled_from(["uniform", "pyramid", "sensitivity"]))
def test_a_split_spends_the_budget_exactly_and_leaves_no_layer_under_the_floor(
    weights: list[float], floor: int, extra: int, alpha: float, how: LayerBudgets
) -> None:
    rows = floor + extra
    layers = split_budget(rows, len(weights), how, floor=floor, weights=weights, alpha=alpha)
    assert sum(layers) == rows * len(weights)
    assert min(layers) >= floor
    assert all(isinstance(layer, int) for layer in layers)


@given(WEIGHTS, FLOORS, EXTRA, ALPHAS)
def test_a_more_sensitive_layer_never_gets_fewer_rows(
    weights: list[float], floor: int, extra: int, alpha: float
) -> None:
    layers = split_budget(
        floor + extra, len(weights), "sensitivity", floor=floor, weights=weights, alpha=alpha
    )
    for one, its_rows in zip(weights, layers, strict=True):
        for other, others_rows in zip(weights, layers, strict=True):
            if one > other:
                # Rounding whole rows may put equals one row apart.
                assert its_rows >= others_rows - (one - other < 1e-9)


@given(WEIGHTS, st.data(), FLOORS, EXTRA)
def test_more_sensitivity_never_costs_a_layer_rows(
    weights: list[float], data: st.DataObject, floor: int, extra: int
) -> None:
    layer = data.draw(st.integers(0, len(weights) - 1))
    # From all zeros every layer has the mean, which the one that is sensitive can only pass.
    more = [weight + 0.5 * (index == layer) for index, weight in enumerate(weights)]
    before = split_budget(floor + extra, len(weights), "sensitivity", floor=floor, weights=weights)
    after = split_budget(floor + extra, len(weights), "sensitivity", floor=floor, weights=more)
    assert after[layer] >= before[layer]


@given(WEIGHTS, EXTRA)
def test_three_quarters_of_the_mean_are_left_to_the_least_sensitive_layer(
    weights: list[float], rows: int
) -> None:
    assert (
        min(split_budget(rows, len(weights), "sensitivity", floor=0, weights=weights))
        >= rows * 3 // 4
    )


def test_rows_are_in_proportion_to_sensitivity_to_the_power_of_alpha() -> None:
    assert split_budget(
        100, 4, "sensitivity", floor=1, weights=[0.4, 0.35, 0.5, 0.35], alpha=1.0
    ) == (
        100,
        88,
        125,
        87,
    )
    assert split_budget(90, 3, "sensitivity", floor=1, weights=[0.9, 1.0, 1.0], alpha=2.0) == (
        78,
        96,
        96,
    )


def test_rows_added_by_the_floor_are_taken_from_the_other_layers_in_proportion() -> None:
    assert split_budget(100, 3, "sensitivity", floor=60, weights=[0.0, 0.1, 0.3], alpha=1.0) == (
        75,
        75,
        150,
    )
    assert split_budget(100, 3, "sensitivity", floor=90, weights=[0.0, 0.1, 0.3], alpha=1.0) == (
        90,
        90,
        120,
    )
    assert split_budget(
        100, 4, "sensitivity", floor=40, weights=[0.0, 0.4, 0.4, 0.5], alpha=1.0
    ) == (
        75,
        100,
        100,
        125,
    )


def test_the_largest_remainders_are_rounded_up() -> None:
    assert split_budget(10, 3, "sensitivity", floor=0, weights=[0.26, 0.37, 0.37], alpha=1.0) == (
        8,
        11,
        11,
    )
    assert split_budget(10, 3, "sensitivity", floor=0, weights=[1.0, 1.0, 1.0], alpha=1.0) == (
        10,
        10,
        10,
    )


def test_a_model_in_which_no_layer_is_sensitive_gets_equal_layers() -> None:
    assert split_budget(64, 5, "sensitivity", floor=8, weights=[0.0] * 5) == (64,) * 5


@given(st.integers(1, 80), st.integers(0, 1000))
def test_a_pyramid_falls_with_depth_in_equal_steps(n_layers: int, rows: int) -> None:
    layers = split_budget(rows, n_layers, "pyramid", floor=0)
    steps = [above - below for above, below in pairwise(layers)]
    assert all(step >= 0 for step in steps)
    assert not steps or max(steps) - min(steps) <= 2


def test_a_pyramid_ends_at_a_twentieth_of_the_mean_where_the_floor_allows_it() -> None:
    assert split_budget(100, 3, "pyramid", floor=1) == (195, 100, 5)
    assert split_budget(100, 3, "pyramid", floor=40)[-1] == 40


def test_a_budget_under_the_floor_is_refused() -> None:
    with pytest.raises(BadSettings, match="36 rows is under the 37"):
        split_budget(36, 4, "uniform", floor=37)


@pytest.mark.parametrize("weights", [None, [0.1, 0.2]])
def test_sensitivity_without_a_profile_of_this_model_is_refused(
    weights: list[float] | None,
) -> None:
    with pytest.raises(BadSettings, match="profile-layers"):
        split_budget(64, 3, "sensitivity", floor=8, weights=weights)


def test_the_papers_alpha_depends_on_the_family() -> None:
    assert get_alpha("llama") == 1.1
    assert [get_alpha(family) for family in ("qwen2", "qwen3")] == [1.3, 1.3]


@given(WEIGHTS, FLOORS, EXTRA, st.integers(1, 5))
def test_layers_that_share_a_selection_get_the_same_rows_and_the_sum_stays(
    weights: list[float], floor: int, extra: int, group: int
) -> None:
    layers = split_budget(floor + extra, len(weights), "sensitivity", floor=floor, weights=weights)
    together = share_within_groups(layers, group, floor=floor)
    assert sum(together) == sum(layers)
    assert min(together) >= floor
    for start in range(0, len(together), group):
        assert len(set(together[start : start + group])) == 1


def test_a_groups_rows_are_the_mean_of_its_layers() -> None:
    assert share_within_groups((10, 30, 50, 70), 2, floor=1) == (20, 20, 60, 60)
    assert share_within_groups((40, 40, 60, 60, 50), 2, floor=1) == (40, 40, 60, 60, 50)
    assert share_within_groups((10, 30, 50, 70), 1, floor=1) == (10, 30, 50, 70)
    assert share_within_groups((10, 30, 50), 4, floor=1) == (30, 30, 30)
