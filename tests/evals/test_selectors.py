"""Selectors against plain computations on small tensors."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from evals import selectors
from evals.selectors import CHUNK, ChunkSummaries
from workers.primitives.observation import Observed

LAYERS = 2
HEADS = 4
KV_HEADS = 2
DIM = 8
LENGTH = 50


def draw(seed: int) -> tuple[Observed, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    queries = tuple(torch.randn(HEADS, 3, DIM, generator=generator) for _ in range(LAYERS))
    keys = [torch.randn(KV_HEADS, LENGTH, DIM, generator=generator) for _ in range(LAYERS)]
    return Observed(queries, torch.full((3,), LENGTH, dtype=torch.int32)), keys


@given(st.integers(0, 1000), st.integers(5, LENGTH))
def test_scores_are_the_mean_over_heads_of_the_largest_weight(seed: int, count: int) -> None:
    observed, keys = draw(seed)
    seen = (
        torch.randperm(LENGTH, generator=torch.Generator().manual_seed(seed))[:count].sort().values
    )
    found = selectors.signal_scores(observed, keys, seen, sinks=0)
    expected = torch.zeros(LENGTH)
    for queries, layer in zip(observed.queries, keys, strict=True):
        for head in range(HEADS):
            own = layer[head // (HEADS // KV_HEADS), seen]
            expected[seen] += (queries[head] @ own.T * DIM**-0.5).softmax(-1).amax(0) / (
                LAYERS * HEADS
            )
    torch.testing.assert_close(found, expected)


@given(st.integers(0, 1000))
def test_scores_until_without_a_limit_are_the_scores(seed: int) -> None:
    observed, keys = draw(seed)
    active = torch.arange(0, 10)
    order = torch.arange(LENGTH - 1, 9, -1)
    scores, seen = selectors.scores_until(observed, keys, active, order, 4, lambda: False)
    torch.testing.assert_close(
        scores, selectors.signal_scores(observed, keys, torch.arange(LENGTH), 4)
    )
    assert seen.tolist() == order.tolist()
    none, nothing = selectors.scores_until(observed, keys, active, order, 4, lambda: True)
    assert not len(nothing)
    assert not none[10:].any()


@given(st.integers(0, 1000))
def test_a_chunk_is_ranked_by_an_upper_bound_of_its_keys(seed: int) -> None:
    observed, keys = draw(seed)
    ranked = ChunkSummaries(keys, LENGTH).rank(observed)
    assert sorted(ranked) == list(range(-(-LENGTH // CHUNK)))
    alone = [layer.clone() for layer in keys]
    for layer, queries in zip(alone, observed.queries, strict=True):
        layer[:, 20] = 50 * queries.reshape(KV_HEADS, -1, DIM).mean(1)
    assert ChunkSummaries(alone, LENGTH).rank(observed)[0] == 20 // CHUNK


@given(st.sets(st.integers(0, 199), min_size=1), st.integers(1, 250), st.integers(0, 199))
def test_random_oldest_and_nearest_take_candidates_only(
    candidates: set[int], count: int, position: int
) -> None:
    evicted = torch.tensor(sorted(candidates))
    most = min(count, len(candidates))
    for chosen in (
        selectors.random_tokens(evicted, count, "seed"),
        selectors.oldest_tokens(evicted, count),
        selectors.nearest_tokens(evicted, [position], count),
    ):
        assert len(set(chosen.tolist())) == most
        assert set(chosen.tolist()) <= candidates
    assert selectors.random_tokens(evicted, count, "seed").equal(
        selectors.random_tokens(evicted, count, "seed")
    )
    far = sorted(abs(each - position) for each in candidates)
    assert (
        sorted((selectors.nearest_tokens(evicted, [position], count) - position).abs().tolist())
        == far[:most]
    )


def test_chunks_are_taken_until_there_are_enough_tokens() -> None:
    candidates = torch.tensor([0, 1, 17, 18, 19, 40])
    assert selectors.tokens_of_first_chunks([1, 0, 2], candidates, 1).tolist() == [17, 18, 19]
    assert selectors.tokens_of_first_chunks([1, 0, 2], candidates, 4).tolist() == [0, 1, 17, 18, 19]
    assert selectors.tokens_of_first_chunks([2], candidates, 10).tolist() == [40]
