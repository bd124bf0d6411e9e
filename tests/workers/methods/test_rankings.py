"""Rankings of each method, on a few rows, worked out by hand."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from workers import methods
from workers.methods import LayerRows
from workers.primitives import scoring

ROOT = 8**0.5
"""Square root of the head size: a key `ROOT * log(w)` along a unit query gets weight w."""


def _kept(name: str, rows: LayerRows, budget: int, **settings: Any) -> list[list[int]]:
    """Positions that a method keeps, per head."""
    method = methods.build(name, json.dumps(settings))
    indices = method.select(method.scores(rows), rows.positions, budget)
    return [rows.positions[head][kept[kept >= 0]].tolist() for head, kept in enumerate(indices)]


def _scores(name: str, rows: LayerRows, **settings: Any) -> Tensor:
    return methods.build(name, json.dumps(settings)).scores(rows)


@pytest.fixture
def make_attended(make_rows: Callable[..., LayerRows]) -> Callable[..., LayerRows]:
    """make_attended(first, second): rows with attention in these proportions, per KV head.

    The two query heads of a group see `first` with their one query; with `second`, there are two
    queries: the first query head of a group sees `first` twice, the other one `first`, then
    `second`.
    """

    def make(
        first: Sequence[Sequence[float]], second: Sequence[Sequence[float]] | None = None
    ) -> LayerRows:
        n = len(first[0])
        tokens = 2 if second else 1
        keys = torch.zeros(2, n, 8)
        keys[..., 0] = ROOT * torch.tensor(first).log()
        queries = torch.zeros(4, tokens, 8)
        queries[..., 0] = 1
        if second:
            keys[..., 1] = ROOT * torch.tensor(second).log()
            queries[1::2, 1] = torch.eye(8)[1]
        after = torch.full((tokens,), n - 1, dtype=torch.int32)
        return make_rows([range(n)] * 2, keys=keys, queries=queries, query_positions=after)

    return make


EVEN = [1.0, 1, 1, 1, 1, 1, 1, 1]


def test_streaming_keeps_sinks_and_the_newest(rows: LayerRows) -> None:
    assert _kept("streaming_llm", rows, 8, sinks=3) == [
        [0, 2, *range(36, 48, 2)],
        [0, 2, *range(28, 40, 2)],
    ]


def test_streaming_gives_sinks_half_of_the_budget_at_most(rows: LayerRows) -> None:
    assert _kept("streaming_llm", rows, 4, sinks=128)[0] == [0, 42, 44, 46], (
        "of sinks 0 and 1, row 0 is there"
    )


def test_oldest_keeps_the_first_rows(rows: LayerRows) -> None:
    assert _kept("oldest", rows, 3) == [[0, 2, 4]] * 2


def test_random_draws_anew_for_every_layer_and_eviction(rows: LayerRows) -> None:
    def drawn(**changes: Any) -> Tensor:
        return methods.build("random").scores(replace(rows, **changes))

    assert torch.equal(drawn(), drawn())
    assert not torch.equal(drawn(), drawn(seed=10))
    assert not torch.equal(drawn(), drawn(layer=2))
    assert drawn(seed=2**64 - 1).shape == rows.positions.shape


@pytest.mark.parametrize("group", ["mean", "max"])
def test_snapkv_ranks_by_mean_attention_of_the_window(rows: LayerRows, group: str) -> None:
    weights = scoring.attention(rows.queries, rows.keys, rows.positions, rows.query_positions)
    by_query_head = weights.mean(2)
    expected = by_query_head.mean(1) if group == "mean" else by_query_head.amax(1)
    assert torch.allclose(_scores("snapkv", rows, window=5, pool=1, group=group), expected)


def test_snapkv_pools_what_is_before_the_window(make_attended: Callable[..., LayerRows]) -> None:
    rows = make_attended([[6, 1, 1, 1, 3, 1, 1, 2], EVEN])
    pooled = _scores("snapkv", rows, window=1, pool=3)[0] * 16
    assert pooled.tolist() == pytest.approx([6, 6, 1, 3, 3, 3, 1, 2]), (
        "row 7 is the window: it lifts no neighbour"
    )
    averaged = _scores("snapkv", rows, window=1, pool=3, pooling="mean")[0] * 16 * 3
    assert averaged.tolist() == pytest.approx([7, 8, 3, 5, 5, 5, 2, 6]), (
        "past the ends there are zeros"
    )


def test_snapkv_keeps_its_window_in_half_of_the_budget(
    make_attended: Callable[..., LayerRows],
) -> None:
    rows = make_attended([[6, 1, 1, 1, 5, 4, 1, 1], EVEN])
    assert _kept("snapkv", rows, 4, window=3, pool=1)[0] == [0, 4, 6, 7]
    assert _kept("snapkv", rows, 6, window=3, pool=1)[0] == [0, 1, 4, 5, 6, 7]


def test_snapkv_without_an_observed_token_scores_all_rows_alike(rows: LayerRows) -> None:
    blind = replace(rows, queries=rows.queries[:, :0], query_positions=rows.query_positions[:0])
    assert not _scores("snapkv", blind).any()


def test_pyramidkv_ranks_as_snapkv(rows: LayerRows) -> None:
    assert _kept("pyramidkv", rows, 7, window=4) == _kept("snapkv", rows, 7, window=4)


def test_adakv_shares_the_budget_between_heads_above_a_floor(
    make_attended: Callable[..., LayerRows],
) -> None:
    rows = make_attended([[8, 7, 6, 5, 4, 3, 2, 1], [90, 1, 1, 2, 1, 1, 1, 1]])
    # In 36ths and 98ths, the window (row 7) first: head 1 has one row of more than a few percent.
    assert _kept("adakv", rows, 4, window=1, pool=1, floor=0) == [[0, 1, 2, 3, 4, 7], [0, 7]]
    assert _kept("adakv", rows, 4, window=1, pool=1, floor=0.75) == [[0, 1, 2, 3, 7], [0, 3, 7]]
    assert _kept("adakv", rows, 4, window=1, pool=1, floor=1) == [[0, 1, 2, 7], [0, 1, 3, 7]]


def test_h2o_keeps_heavy_hitters_and_the_most_recent(make_rows: Callable[..., LayerRows]) -> None:
    gathered = torch.tensor([[4.0, 1, 3, 0, 2, 0, 0, 0], [0, 0, 0, 0, 0, 0, 9, 8]])
    rows = make_rows([range(8)] * 2, accumulated=gathered)
    assert _kept("h2o", rows, 4) == [[0, 2, 6, 7], [0, 1, 6, 7]]
    assert _kept("h2o", rows, 4, recent=0) == [[0, 1, 2, 4], [0, 1, 6, 7]]
    assert _scores("h2o", rows, per_query=True)[0].tolist() == pytest.approx(
        [4 / 8, 1 / 7, 3 / 6, 0, 2 / 4, 0, 0, 0]
    )


def test_scissorhands_keeps_rows_hit_often_for_their_age(
    make_rows: Callable[..., LayerRows],
) -> None:
    hits = torch.tensor([[4.0, 4, 1, 4, 0, 1, 0, 0], [8, 0, 0, 0, 0, 0, 0, 0]])
    rows = make_rows([range(8)] * 2, accumulated=hits)
    assert _scores("scissorhands", rows)[0].tolist() == pytest.approx(
        [4 / 8, 4 / 7, 1 / 6, 4 / 5, 0, 1 / 3, 0, 0]
    )
    assert _kept("scissorhands", rows, 4, recent=1) == [[0, 1, 3, 7], [0, 1, 2, 7]]
    assert _kept("scissorhands", rows, 4, recent=100) == [[1, 3, 6, 7], [0, 1, 6, 7]], (
        "half of the budget"
    )


def test_keydiff_keeps_keys_unlike_the_mean_of_their_directions(
    make_rows: Callable[..., LayerRows],
) -> None:
    keys = torch.zeros(2, 4, 8)
    keys[:, :, 0] = torch.tensor([1.0, 100.0, 0.0, 3.0])
    keys[:, 2, 1] = 2
    rows = make_rows([range(4), range(3)], keys=keys)
    # Directions e0, e0, e1, e0: their mean is (3, 1) / 4. Head 1 has no fourth row: (2, 1) / 3.
    assert _scores("keydiff", rows)[0].tolist() == pytest.approx(
        [-3 / 10**0.5] * 2 + [-1 / 10**0.5, -3 / 10**0.5]
    )
    assert _scores("keydiff", rows)[1, :3].tolist() == pytest.approx(
        [-2 / 5**0.5] * 2 + [-1 / 5**0.5]
    )
    assert _kept("keydiff", rows, 1) == [[2], [2]]
    assert _kept("keydiff", rows, 2, pool_heads=True) == [[2], [0, 1, 2]]


def test_knorm_keeps_keys_of_small_norm(make_rows: Callable[..., LayerRows]) -> None:
    keys = torch.zeros(2, 4, 8)
    keys[:, :, 3] = torch.tensor([[2.0, -5.0, 1.0, 3.0], [-1.0, 4.0, -2.0, 3.0]])
    assert _kept("knorm", make_rows([range(4)] * 2, keys=keys), 2) == [[0, 2], [0, 2]]


def test_tova_keeps_the_same_tokens_in_every_head(make_attended: Callable[..., LayerRows]) -> None:
    rows = make_attended([[5, 1, 4, 1, 1, 1, 1, 2], [1, 5, 4, 2, 1, 1, 1, 1]])
    assert _scores("tova", rows)[0].tolist() == pytest.approx(
        [6 / 32, 6 / 32, 8 / 32, 3 / 32] + [2 / 32] * 3 + [3 / 32]
    )
    assert _kept("tova", rows, 2) == [[2, 7]] * 2, "the last token and the best"


def test_chunkkv_keeps_whole_chunks_over_all_heads(make_attended: Callable[..., LayerRows]) -> None:
    rows = make_attended([[5, 1, 4, 3, 1, 1, 1, 2, 1], [1, 2, 4, 2, 1, 7, 1, 1, 1]])
    settings = {"window": 1, "chunk": 2}
    # {0, 1}: 6/19 + 3/20, {2, 3}: 7/19 + 6/20, {4, 5}: 2/19 + 8/20, {6, 7}: 3/19 + 2/20, then
    # {8}: the window.
    chunks = [6 / 19 + 3 / 20, 7 / 19 + 6 / 20, 2 / 19 + 8 / 20, 3 / 19 + 2 / 20, 1 / 19 + 1 / 20]
    by_row = [chunks[row // 2] for row in range(9)]
    assert _scores("chunkkv", rows, **settings)[0].tolist() == pytest.approx(by_row)
    assert _kept("chunkkv", rows, 6, **settings) == [[2, 3, 4, 5, 8]] * 2, (
        "a third chunk would be one row too many"
    )
    assert _kept("chunkkv", rows, 7, **settings) == [[0, 1, 2, 3, 4, 5, 8]] * 2


def test_chunkkv_by_the_mean_does_not_penalise_a_short_chunk(
    make_attended: Callable[..., LayerRows],
) -> None:
    rows = make_attended([[1, 1, 1, 1, 1, 1, 1, 2]] * 2)
    assert _kept("chunkkv", rows, 3, window=1, chunk=3) == [[7]] * 2, (
        "no chunk fits next to the window"
    )
    assert _kept("chunkkv", rows, 4, window=1, chunk=3) == [[0, 1, 2, 7]] * 2
    assert _kept("chunkkv", rows, 4, window=1, chunk=3, aggregate="mean") == [[6, 7]] * 2
    summed, mean = (
        _scores("chunkkv", rows, chunk=3, aggregate=how)[0] * 9 / 2 for how in ("sum", "mean")
    )
    assert summed[[0, 3, 6]].tolist() == pytest.approx([3, 3, 3])
    assert mean[[0, 3, 6]].tolist() == pytest.approx([1, 1, 1.5])


PAPERS = {"rank": "attention", "whole_tokens": False, "topic": 0, "pool": 1}
"""EpiCache's settings in its paper."""
PATCHED = [("infinipot", {}), ("kvzip", {}), ("epicache", PAPERS)]


@pytest.mark.parametrize(("name", "settings"), PATCHED)
def test_a_patched_prompt_counts_its_highest_attention(
    name: str, settings: dict[str, Any], make_attended: Callable[..., LayerRows]
) -> None:
    rows = make_attended([[8, 1, 1, 2, 1, 1, 1, 1], EVEN], second=[[1, 1, 1, 1, 1, 9, 1, 1], EVEN])
    assert _scores(name, rows, **settings)[0].tolist() == pytest.approx(
        [8 / 16, 1 / 16, 1 / 16, 2 / 16, 1 / 16, 9 / 16] + [1 / 16] * 2
    )
    assert _kept(name, rows, 3, **settings, pool_heads=False) == [[0, 3, 5], [0, 1, 2]]


def test_pooled_heads_share_the_layers_rows_by_score(
    make_attended: Callable[..., LayerRows],
) -> None:
    rows = make_attended([[8, 1, 1, 3, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1.5]])
    for name, settings in PATCHED:
        # 8/17, 3/17, 1.5/8.5 and, before the 1/17 of head 0, the 1/8.5 of head 1.
        assert _kept(name, rows, 2, **settings, pool_heads=True) == [[0, 3], [0, 7]]
        assert _kept(name, rows, 4, **settings, pool_heads=True) == [[0, 3], [0, 1, 2, 3, 4, 7]]


def test_epicache_can_average_and_smooth(make_attended: Callable[..., LayerRows]) -> None:
    rows = make_attended([[8, 1, 1, 2, 1, 1, 1, 1], EVEN], second=[[1, 1, 1, 1, 1, 9, 1, 1], EVEN])
    # Three of the four queries of a group see 8, 1, 1, 2, ..., the fourth 1, 1, 1, 1, 1, 9, ...
    assert (_scores("epicache", rows, **PAPERS, reduce="mean")[0] * 64).tolist() == pytest.approx(
        [25, 4, 4, 7, 4, 12, 4, 4]
    )
    smoothed = _scores("epicache", rows, **{**PAPERS, "pool": 3})[0] * 16
    assert smoothed.tolist() == pytest.approx([8, 8, 2, 2, 9, 9, 9, 1])


def test_infinipot_can_average_over_its_prompt(make_attended: Callable[..., LayerRows]) -> None:
    rows = make_attended([[8, 1, 1, 2, 1, 1, 1, 1], EVEN], second=[[1, 1, 1, 1, 1, 9, 1, 1], EVEN])
    averaged = _scores("infinipot", rows, tokens="mean")[0] * 32
    assert averaged.tolist() == pytest.approx([16, 2, 2, 4, 2, 10, 2, 2]), (
        "mean over tokens, max over the group"
    )


def test_epicache_ranks_by_key_difference_and_leaves_the_topic_to_the_ranking(
    rows: LayerRows,
) -> None:
    assert torch.equal(_scores("epicache", rows), _scores("keydiff", rows))
    assert _kept("epicache", rows, 7) == _kept("keydiff", rows, 7), (
        "per head: whole tokens are not shared unevenly"
    )
    method = methods.build("epicache")
    assert (method.whole_tokens, method.topic) == (True, 1.0)


def test_a_prompts_own_keys_take_their_part_of_its_attention(
    make_attended: Callable[..., LayerRows],
) -> None:
    rows = make_attended([[8, 1, 1, 2, 1, 1, 1, 1], EVEN])
    with_own = replace(rows, extra_logsumexp=torch.full((4, 1), 16.0).log())
    for name in ("infinipot", "kvzip"):
        assert (_scores(name, with_own)[0] * 32).tolist() == pytest.approx([8, 1, 1, 2, 1, 1, 1, 1])
    assert torch.equal(
        _scores("epicache", with_own, **PAPERS), _scores("epicache", rows, **PAPERS)
    ), "rows alone"
