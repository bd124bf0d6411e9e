"""How a method's scores and an episode's similarity combine into one ranking of rows."""

import torch

from kvrecall.domain.episodes import EpisodeSegment
from workers.cache.active_cache import EMPTY
from workers.engine.eviction.ranking import combine_scores, segment_similarity
from workers.methods.epicache import EpiCache
from workers.methods.keydiff import KeyDiff

POSITIONS = [torch.tensor([[0, 1, 2, 3], [0, 1, 2, EMPTY]], dtype=torch.int32)] * 2
SCORES = [
    torch.tensor([[4.0, 1.0, 3.0, 2.0], [9.0, 7.0, 8.0, 0.0]]),
    torch.tensor([[1.0, 2.0, 3.0, 4.0], [0.3, 0.2, 0.1, 0.0]]),
]
NO_EPISODE: list[EpisodeSegment] = []


def test_a_method_that_keeps_single_rows_without_a_topic_keeps_its_own_scores() -> None:
    ranks = combine_scores(KeyDiff(), SCORES, POSITIONS, NO_EPISODE)
    assert all(torch.equal(a, b) for a, b in zip(ranks, SCORES, strict=True))


def test_whole_tokens_get_the_mean_of_their_ranks_over_layers_and_heads() -> None:
    ranks = combine_scores(KeyDiff(whole_tokens=True), SCORES, POSITIONS, NO_EPISODE)
    # Ranks of token 0: highest of four, highest of three, lowest of four, highest of three.
    means = [
        (1 + 1 + 0 + 1) / 4,
        (0 + 0 + 1 / 3 + 0.5) / 4,
        (2 / 3 + 0.5 + 2 / 3 + 0) / 4,
        (1 / 3 + 1) / 2,
    ]
    for layer in ranks:
        torch.testing.assert_close(layer, torch.tensor([means, [*means[:3], 0.0]]))


def test_similarity_adds_to_ranks_and_tokens_after_the_build_count_as_part_of_the_episode() -> None:
    method = EpiCache(topic=2.0)
    plain = combine_scores(method, SCORES, POSITIONS, NO_EPISODE)
    segments = [EpisodeSegment(2, 3, 1.0), EpisodeSegment(1, 2, 0.5)]
    near = combine_scores(method, SCORES, POSITIONS, segments)
    for before, after in zip(plain, near, strict=True):
        torch.testing.assert_close(after[0] - before[0], torch.tensor([0.0, 1.0, 2.0, 2.0]))
        assert float(after[1, 3]) == 0.0, "a place without a row has no score"


def test_a_tokens_similarity_is_its_segments() -> None:
    segments = [EpisodeSegment(2, 4, 0.25), EpisodeSegment(6, 8, 0.75)]
    positions = torch.tensor([[0, 2, 3, 4, 6, 7, 8, 90_000]], dtype=torch.int32)
    similarity = segment_similarity(segments, positions)
    assert similarity.tolist() == [[0, 0.25, 0.25, 0, 0.75, 0.75, 1, 1]]
