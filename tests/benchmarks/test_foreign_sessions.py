"""The comparison of foreign and missing sessions at a small size, and that it can tell a difference."""

import random

import numpy as np
import pytest

from benchmarks.foreign_sessions import REQUESTS, compare_ranks, measure


def test_a_small_run_has_a_row_for_each_catalog_and_request() -> None:
    rows = measure(20, 3, random.Random(0), control=True)
    assert len(rows) == 2 * (len(REQUESTS) + 1)
    assert all(row["n"] == 20 for row in rows)


def test_ranks_tell_a_shift_and_no_shift_of_samples() -> None:
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=1000), rng.normal(size=1000)
    share, p_value = compare_ranks(list(first), list(second))
    assert share == pytest.approx(0.5, abs=0.03)
    assert p_value > 0.05
    share, p_value = compare_ranks(list(first + 0.3), list(second))
    assert share > 0.55
    assert p_value < 1e-6
    assert compare_ranks([1, 1], [1, 1]) == (0.5, 1.0)
    # Hollander & Wolfe's example of permeability: U = 35 of 50 pairs, no ties.
    a = [0.80, 0.83, 1.89, 1.04, 1.45, 1.38, 1.91, 1.64, 0.73, 1.46]
    b = [1.15, 0.88, 0.90, 0.74, 1.21]
    share, p_value = compare_ranks(a, b)
    assert share == pytest.approx(35 / 50)
    assert p_value == pytest.approx(0.2207, abs=0.001)
