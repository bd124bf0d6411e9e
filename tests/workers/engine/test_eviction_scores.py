"""The best eviction scores are kept, as many as asked for, however many tokens are evicted."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.engine.eviction_scores import EvictionScores

ROUNDS = st.lists(
    st.dictionaries(st.integers(0, 30), st.integers(-3, 3).map(float), max_size=8), max_size=6
)
"""Scores by token of some evictions, one after the other."""


def updated(scores: EvictionScores, evicted: dict[int, float], limit: int) -> EvictionScores:
    """The scores after an eviction of these tokens, in any order."""
    return scores.updated(torch.tensor([*evicted]), torch.tensor([*evicted.values()]), limit)


@given(ROUNDS)
def test_a_token_has_the_score_of_its_last_eviction(rounds: list[dict[int, float]]) -> None:
    scores = EvictionScores()
    expected: dict[int, float] = {}
    for evicted in rounds:
        scores = updated(scores, evicted, 31)
        expected |= evicted
    assert dict(zip(scores.tokens.tolist(), scores.scores.tolist(), strict=True)) == expected
    assert scores.tokens.tolist() == sorted(expected)
    dense = scores.to_dense(31).tolist()
    assert dense == [expected.get(token, -torch.inf) for token in range(31)]


@given(st.dictionaries(st.integers(0, 30), st.integers(-3, 3).map(float)), st.integers(1, 8))
def test_the_highest_scores_are_kept_and_of_equal_ones_the_earlier_tokens(
    evicted: dict[int, float], limit: int
) -> None:
    scores = updated(EvictionScores(), evicted, limit)
    best = sorted(evicted, key=lambda token: (-evicted[token], token))[:limit]
    assert scores.tokens.tolist() == sorted(best)


def test_scores_survive_as_bytes() -> None:
    scores = updated(EvictionScores(), {7: 0.5, 3: -1.0}, 8)
    read = EvictionScores.from_bytes(scores.to_bytes())
    assert read.tokens.tolist() == [3, 7]
    assert read.scores.tolist() == [-1.0, 0.5]
    assert not len(EvictionScores.from_bytes(b"").tokens)
