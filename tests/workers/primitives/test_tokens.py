"""Per-token values of rows, against their definition written out, whatever the session's length."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from workers.cache.active_cache import EMPTY
from workers.primitives.tokens import TokenIndex, over_chunks, over_heads

HELD = st.lists(
    st.dictionaries(st.integers(0, 15), st.integers(-2, 2).map(float), max_size=9),
    min_size=1,
    max_size=4,
)
"""Per head, scores by position, many of them the same."""
POSITIONS = torch.tensor([[0, 1, 2, 5, 6], [1, 3, 5, EMPTY, EMPTY]], dtype=torch.int32)
SCORES = torch.tensor([[1.0, 2, 4, 8, 16], [32, 64, 128, 0.5, 0.5]])


def _laid_out(heads: list[dict[int, float]], first: int = 0) -> tuple[Tensor, Tensor]:
    """Scores and positions from `first` on; absent rows have a score that must not count."""
    width = max(map(len, heads))
    scores = [[*(head[p] for p in sorted(head)), *[5.0] * (width - len(head))] for head in heads]
    positions = [
        [*(first + p for p in sorted(head)), *[EMPTY] * (width - len(head))] for head in heads
    ]
    shape = (len(heads), width)
    return torch.tensor(scores).view(shape), torch.tensor(positions, dtype=torch.int32).view(shape)


def test_heads_add_up_by_token() -> None:
    assert over_heads(SCORES, POSITIONS)[0].tolist() == [1, 34, 4, 136, 16]
    assert over_heads(SCORES, POSITIONS)[1].tolist() == [34, 64, 136, 0, 0]


def test_chunks_add_up_by_head() -> None:
    assert over_chunks(SCORES, POSITIONS, 3)[0].tolist() == [7, 7, 7, 8, 16]
    assert over_chunks(SCORES, POSITIONS, 3)[1].tolist() == [32, 192, 192, 0, 0]
    mean = over_chunks(SCORES, POSITIONS, 3, mean=True)
    assert mean[0].tolist() == pytest.approx([7 / 3, 7 / 3, 7 / 3, 8, 16])
    assert mean[1, :3].tolist() == [32, 96, 96]


@given(HELD, st.sampled_from([0, 7, 100_000]), st.integers(1, 6))
def test_a_rows_chunk_is_that_of_its_position_however_late_in_the_session(
    heads: list[dict[int, float]], first: int, chunk: int
) -> None:
    scores, positions = _laid_out(heads, first)
    found = over_chunks(scores, positions, chunk)
    for head, totals in zip(heads, found.tolist(), strict=True):
        ids = {position: (first + position) // chunk for position in sorted(head)}
        expected = [sum(head[p] for p in head if ids[p] == ids[position]) for position in ids]
        assert totals[: len(expected)] == pytest.approx(expected)


@given(st.lists(HELD, min_size=1, max_size=3), st.sampled_from([0, 100_000]))
def test_a_tokens_mean_is_over_the_layers_and_heads_that_hold_it(
    layers: list[list[dict[int, float]]], first: int
) -> None:
    laid_out = [_laid_out(heads, first) for heads in layers]
    tokens = TokenIndex.from_positions([positions for _, positions in laid_out])
    means = tokens.means([scores for scores, _ in laid_out])
    assert tokens.count <= 1 + sum(len(head) for heads in layers for head in heads)
    for heads, rows in zip(layers, tokens.rows, strict=True):
        for head, found in zip(heads, means[rows].tolist(), strict=True):
            for position, mean in zip(sorted(head), found, strict=False):
                scores = [each[position] for h in layers for each in h if position in each]
                assert mean == pytest.approx(sum(scores) / len(scores))


def test_layers_with_the_same_positions_are_indexed_once() -> None:
    tokens = TokenIndex.from_positions([POSITIONS, POSITIONS])
    assert tokens.rows[0] is tokens.rows[1]
    assert tokens.count == 7, "six tokens, and the absent rows"
    assert TokenIndex.from_positions([]).count == 0
