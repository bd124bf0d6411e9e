"""Means and variances of consecutive keys, whatever pieces they arrive in."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvstore.errors import RowRangeError
from kvstore.format.page import PageLayout
from kvstore.index.arrays import gather_runs
from kvstore.index.summaries import FANOUT, KeySummaries

HEADS, DIMENSIONS, ROWS = 2, 4, 1300


def random_keys(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(HEADS, rows, DIMENSIONS, generator=torch.Generator().manual_seed(seed))


def all_nodes(summaries: KeySummaries) -> list[Tensor]:
    """The nodes of all levels that have some."""
    levels: list[Tensor] = []
    while summaries.count(len(levels) + 1):
        levels.append(summaries.nodes(len(levels) + 1))
    return levels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_node_has_the_mean_and_the_variance_of_its_keys(dtype: torch.dtype) -> None:
    keys = (random_keys(ROWS) + 3).to(dtype)
    summaries = KeySummaries()
    summaries.extend(keys)
    levels = all_nodes(summaries)
    assert [level.shape[1] for level in levels] == [162, 20, 2]
    for number, nodes in enumerate(levels, 1):
        size = FANOUT**number
        members = keys[:, : nodes.shape[1] * size].double().unflatten(1, (-1, size))
        expected = torch.cat([members.mean(2), members.var(2, correction=0)], -1)
        torch.testing.assert_close(nodes.double(), expected, rtol=1e-5, atol=1e-5)


@settings(deadline=None, max_examples=40)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["extend", "truncate"]), st.integers(0, ROWS)), max_size=6
    ),
    kept=st.integers(0, ROWS),
    rows=st.integers(0, ROWS),
)
def test_nodes_depend_on_the_keys_alone(steps: list[tuple[str, int]], kept: int, rows: int) -> None:
    keys = random_keys(ROWS)
    summaries = KeySummaries()
    for number, (step, to) in enumerate(steps):
        # Rows that are forgotten had other keys than those which come in their place.
        if step == "truncate" or to < summaries.rows:
            summaries.truncate(to)
        else:
            others = random_keys(ROWS, seed=number + 1)
            summaries.extend(torch.cat([keys[:, : summaries.rows], others], 1)[:, :to])
    summaries.truncate(0)
    summaries.extend(keys[:, : min(kept, rows)])
    start = summaries.needed_from
    summaries.extend(keys[:, start:rows], start)
    fresh = KeySummaries()
    fresh.extend(keys[:, :rows])
    assert summaries.rows == rows
    for mine, other in zip(all_nodes(summaries), all_nodes(fresh), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize(
    ("rows", "most", "level"),
    [(7, 4, 0), (8, 4, 1), (39, 4, 1), (ROWS, 20, 2), (ROWS, 162, 1), (ROWS, 2, 3)],
)
def test_a_search_begins_at_the_lowest_level_that_is_small_enough(
    rows: int, most: int, level: int
) -> None:
    summaries = KeySummaries()
    summaries.extend(random_keys(rows))
    assert summaries.lowest_level(most) == level


def test_runs_are_gathered_in_one_piece() -> None:
    summaries = KeySummaries()
    summaries.extend(random_keys(500))
    summaries.extend(random_keys(ROWS))
    runs = torch.tensor([[7, 0, 20], [3, 19, 20]])
    gathered = summaries.nodes(1, runs).unflatten(1, (3, FANOUT))
    for head in range(HEADS):
        for place, run in enumerate(runs[head].tolist()):
            members = summaries.nodes(1)[head, run * FANOUT : (run + 1) * FANOUT]
            assert torch.equal(gathered[head, place, : len(members)], members)
    assert summaries.count(1) == 162, "the last run has 2 of 8 nodes"


def test_runs_of_rows_are_their_rows() -> None:
    rows = random_keys(48)
    runs = torch.tensor([[2, 0], [5, 1]])
    expected = [rows[head].view(6, 8 * DIMENSIONS)[runs[head]] for head in range(HEADS)]
    assert torch.equal(gather_runs(rows, runs, 8), torch.stack(expected).view(2, 16, DIMENSIONS))


@settings(deadline=None, max_examples=40)
@given(ends=st.lists(st.integers(0, ROWS), min_size=1, max_size=5))
def test_memory_is_bounded_by_what_was_announced(ends: list[int]) -> None:
    summaries = KeySummaries()
    for end in sorted(ends):
        summaries.extend(random_keys(ROWS)[:, :end])
    layout = PageLayout(1, HEADS, DIMENSIONS, torch.float32, "m")
    assert summaries.nbytes <= KeySummaries.bytes_for(layout, max(ends))


def test_keys_of_fewer_rows_or_other_heads_are_refused() -> None:
    summaries = KeySummaries()
    summaries.extend(random_keys(600))
    with pytest.raises(RowRangeError, match="599 rows"):
        summaries.extend(random_keys(599))
    with pytest.raises(RowRangeError, match="1 heads"):
        summaries.extend(random_keys(700)[:1])
    with pytest.raises(RowRangeError, match="from 608 on"):
        summaries.extend(random_keys(100), 608)
