"""Scores, compared with their definitions."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvrecall.domain.settings.methods import Reduction
from workers.cache.active_cache import EMPTY
from workers.primitives import scoring
from workers.primitives.observation import causal_logsumexp

HEADS = 4
KV_HEADS = 2
TOKENS = 5
ROWS = 9
HEAD_DIM = 8


@pytest.fixture
def rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys, key positions (one head shorter), and query positions among the keys'."""
    generator = torch.Generator().manual_seed(3)
    queries = torch.randn(HEADS, TOKENS, HEAD_DIM, generator=generator)
    keys = torch.randn(KV_HEADS, ROWS, HEAD_DIM, generator=generator)
    positions = torch.tensor(
        [[0, 1, 4, 6, 7, 8, 9, 10, 11], [0, 2, 3, 6, 8, 10, 11, EMPTY, EMPTY]], dtype=torch.int32
    )
    return queries, keys, positions, torch.tensor([7, 8, 9, 10, 11], dtype=torch.int32)


def test_attention_is_the_softmax_over_the_rows_a_query_may_see(
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    queries, keys, positions, query_positions = rows
    weights = scoring.attention(queries, keys, positions, query_positions)
    assert weights.shape == (KV_HEADS, HEADS // KV_HEADS, TOKENS, ROWS)
    for head in range(HEADS):
        kv_head, member = divmod(head, HEADS // KV_HEADS)
        for token in range(TOKENS):
            powers = [
                math.exp(float(queries[head, token] @ keys[kv_head, row]) / math.sqrt(HEAD_DIM))
                if positions[kv_head, row] <= query_positions[token]
                else 0.0
                for row in range(ROWS)
            ]
            expected = torch.tensor([power / sum(powers) for power in powers])
            assert torch.allclose(weights[kv_head, member, token], expected, atol=1e-6)


def test_keys_outside_the_cache_take_their_part_of_the_softmax(
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """A prompt's own keys as rows, or as their log-sum-exp: the same for the other rows."""
    queries, keys, positions, _ = rows
    own = torch.randn(KV_HEADS, TOKENS, HEAD_DIM, generator=torch.Generator().manual_seed(8))
    at = torch.arange(20, 20 + TOKENS, dtype=torch.int32)
    among = scoring.attention(
        queries,
        torch.cat([keys, own], dim=1),
        torch.cat([positions, at.expand(KV_HEADS, -1)], dim=1),
        at,
    )
    outside = scoring.attention(queries, keys, positions, at, causal_logsumexp(queries, own))
    assert torch.allclose(outside, among[..., :ROWS], atol=1e-6)
    reduced = scoring.attention_scores(queries, keys, positions, at, causal_logsumexp(queries, own))
    assert torch.equal(reduced, outside.amax((1, 2)))


def test_a_query_that_sees_no_row_gives_no_attention() -> None:
    weights = scoring.attention(
        torch.ones(2, 1, 4), torch.ones(1, 3, 4), torch.tensor([[5, 6, EMPTY]]), torch.tensor([2])
    )
    assert not weights.any()


def test_attention_of_half_precision_rows_is_computed_in_full(
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    queries, keys, positions, query_positions = rows
    half = scoring.attention(queries.bfloat16(), keys.bfloat16(), positions, query_positions)
    assert half.dtype == torch.float32
    full = scoring.attention(
        queries.bfloat16().float(), keys.bfloat16().float(), positions, query_positions
    )
    assert torch.equal(half, full)


@pytest.mark.parametrize("tokens", ["max", "mean"])
@pytest.mark.parametrize("group", ["max", "mean"])
@pytest.mark.parametrize("at_once", [1, 2 * HEADS * ROWS, 1 << 25])
def test_attention_is_reduced_over_tokens_then_the_group_in_chunks_as_at_once(
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    tokens: Reduction,
    group: Reduction,
    at_once: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    how: dict[Reduction, Callable[[torch.Tensor, int], torch.Tensor]] = {
        "max": torch.amax,
        "mean": torch.mean,
    }
    expected = how[group](how[tokens](scoring.attention(*rows), 2), 1)
    monkeypatch.setattr(scoring, "_MAX_WEIGHTS", at_once)
    chunked = scoring.attention_scores(*rows, tokens=tokens, group=group)
    assert chunked.shape == (KV_HEADS, ROWS)
    assert torch.allclose(chunked, expected, atol=1e-7)


def test_without_a_query_every_score_is_zero(
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    queries, keys, positions, query_positions = rows
    assert torch.equal(
        scoring.attention_scores(queries[:, :0], keys, positions, query_positions[:0]),
        torch.zeros(KV_HEADS, ROWS),
    )
    assert scoring.attention_scores(
        queries, keys[:, :0], positions[:, :0], query_positions
    ).shape == (
        KV_HEADS,
        0,
    )


CONTIGUOUS = torch.arange(20, dtype=torch.int32).expand(2, -1)


@pytest.mark.parametrize("width", [3, 5])
def test_smoothing_by_the_mean_counts_zeros_past_the_ends(width: int) -> None:
    scores = torch.rand(2, 20, generator=torch.Generator().manual_seed(2))
    smooth = scoring.smooth(scores, CONTIGUOUS, width, "mean")
    for row in range(20):
        around = scores[:, max(0, row - width // 2) : row + width // 2 + 1]
        assert torch.allclose(smooth[:, row], around.sum(1) / width)


@pytest.mark.parametrize("pooling", ["max", "mean"])
def test_rows_that_are_far_apart_lend_each_other_no_score(pooling: Reduction) -> None:
    positions = torch.tensor([[0, 1, 500, 900, 901, EMPTY]], dtype=torch.int32)
    scores = torch.tensor([[8.0, 0, 0, 0, 4, 64]])
    smooth = scoring.smooth(scores, positions, 3, pooling)[0, :5].tolist()
    pooled = {"max": [8, 8, 0, 4, 4], "mean": [8 / 3, 8 / 2, 0, 4 / 2, 4 / 3]}
    assert smooth == pytest.approx(pooled[pooling])


@given(st.sets(st.integers(0, 40), min_size=1), st.integers(1, 9), st.integers(0, 9))
def test_smoothing_is_over_the_resident_tokens_around_a_row(
    held: set[int], width: int, seed: int
) -> None:
    positions = sorted(held)
    scores = torch.rand(len(held), generator=torch.Generator().manual_seed(seed)).tolist()
    by_token = dict(zip(positions, scores, strict=True))
    laid_out = torch.tensor([positions], dtype=torch.int32)
    found = {
        pooling: scoring.smooth(torch.tensor([scores]), laid_out, width, pooling)[0].tolist()
        for pooling in ("max", "mean")
    }
    for row, position in enumerate(positions):
        around = range(position - width // 2, position - width // 2 + width)
        near = [by_token[token] for token in around if token in held]
        ends = sum(not positions[0] <= token <= positions[-1] for token in around)
        assert found["max"][row] == pytest.approx(max(near))
        assert found["mean"][row] == pytest.approx(sum(near) / (len(near) + ends))


def test_smoothing_before_a_position_leaves_later_rows_unchanged() -> None:
    positions = torch.tensor([[3, 4, 5, 6, 7], [1, 4, 5, 6, EMPTY]], dtype=torch.int32)
    scores = torch.tensor([[1.0, 2, 3, 9, 5], [1, 7, 2, 3, 4]])
    smooth = scoring.smooth_before(scores, positions, 6, 3)
    assert smooth.tolist() == [[2, 3, 3, 9, 5], [1, 7, 7, 3, 4]]


def test_a_key_is_compared_with_the_mean_direction_of_the_resident_rows() -> None:
    keys = torch.tensor([[[2.0, 0], [0, 3], [50, 50]], [[1, 0], [1, 0], [-1, 0]]])
    positions = torch.tensor([[0, 1, EMPTY], [0, 1, 2]], dtype=torch.int32)
    cosine = scoring.cosine_to_mean(keys, positions)
    assert cosine[0, :2].tolist() == pytest.approx([2**-0.5, 2**-0.5])
    assert cosine[1].tolist() == pytest.approx([1, 1, -1])


@pytest.mark.parametrize("width", [1, 2, 3, 7, 63])
def test_smoothing_gives_a_row_its_neighbours_best_score(width: int) -> None:
    scores = torch.rand(2, 20, generator=torch.Generator().manual_seed(2))
    smooth = scoring.smooth(scores, CONTIGUOUS, width)
    assert smooth.shape == scores.shape
    for row in range(20):
        first = max(0, row - width // 2)
        assert torch.equal(smooth[:, row], scores[:, first : row - width // 2 + width].amax(1))


def test_recency_puts_sinks_first_then_the_newest() -> None:
    positions = torch.tensor([[0, 1, 2, 5, 9], [0, 3, 4, 8, EMPTY]], dtype=torch.int32)
    scores = scoring.recency(positions, sinks=2)
    assert scores[0].argsort(descending=True, stable=True).tolist() == [0, 1, 4, 3, 2]
    assert scores[1, :4].argsort(descending=True, stable=True).tolist() == [0, 3, 2, 1]


HELD = st.lists(
    st.dictionaries(st.integers(0, 15), st.integers(-2, 2).map(float), max_size=9),
    min_size=1,
    max_size=4,
)
"""Per head, scores by position, many of them the same."""


def _laid_out(heads: list[dict[int, float]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores and positions; absent rows have a score that must not count."""
    width = max(map(len, heads))
    scores = [[*(head[p] for p in sorted(head)), *[5.0] * (width - len(head))] for head in heads]
    positions = [[*sorted(head), *[EMPTY] * (width - len(head))] for head in heads]
    shape = (len(heads), width)
    return torch.tensor(scores).view(shape), torch.tensor(positions, dtype=torch.int32).view(shape)


@given(HELD)
def test_ranks_go_from_the_lowest_score_to_the_highest(heads: list[dict[int, float]]) -> None:
    ranks = scoring.row_ranks(*_laid_out(heads))
    for head, found in zip(heads, ranks.tolist(), strict=True):
        best = sorted(head, key=lambda position: (head[position], -position))
        expected = [best.index(position) / max(1, len(head) - 1) for position in sorted(head)]
        assert found == pytest.approx(expected + [0.0] * (len(found) - len(expected)))
