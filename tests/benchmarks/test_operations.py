"""The cost of traces and scrapes, at a small size, and the row of its share."""

import random

import pytest

from benchmarks.operations.scrapes import measure_scrapes
from benchmarks.operations.turns import OBSERVED, PLAIN, build_rows, measure_turns


def test_a_small_run_measures_both_pairs_on_the_same_turns() -> None:
    observed, plain, share = measure_turns(2, 8, random.Random(0))
    assert (observed["condition"], plain["condition"]) == (OBSERVED, PLAIN)
    assert [row["n"] for row in (observed, plain, share)] == [2, 2, 2]
    assert observed["median"] > 0
    assert observed["ratio_to"] == PLAIN


def test_the_share_is_that_of_pairs_of_turns() -> None:
    rows = build_rows({OBSERVED: [1.1, 2.2], PLAIN: [1.0, 2.0]}, tokens=8)
    assert rows[0]["ratio"] == pytest.approx(1.1)
    assert rows[-1]["mean"] == pytest.approx(0.1)


def test_a_page_has_as_many_series_however_many_sessions_there_are() -> None:
    few = list(measure_scrapes(2, scrapes=2))
    more = list(measure_scrapes(40, scrapes=2))
    for row in (*few, *more):
        assert row["n"] == 2
        assert row["series"] < 1500
    assert few[1]["series"] == more[1]["series"]
