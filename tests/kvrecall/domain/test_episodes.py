"""Episodes out of vectors: pure functions of their arguments and the seed."""

from itertools import pairwise
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrecall.domain.episodes import (
    Clusters,
    Segment,
    Vectors,
    assign,
    cluster,
    cosine,
    match,
    nearest_members,
    nearness,
    plan_episodes,
    rebuild_due,
    split_segments,
    vectors_from_bytes,
    vectors_to_bytes,
)
from kvrecall.domain.settings.session import EpisodeSettings
from kvrecall.domain.utterances import Utterance

TOKENS = 10
"""Tokens of an utterance in these tests."""


def said(count: int) -> list[Utterance]:
    sides: tuple[Literal["user", "assistant"], ...] = ("user", "assistant")
    return [Utterance(sides[n % 2], f"u{n}", TOKENS * n, TOKENS * (n + 1)) for n in range(count)]


def topics(*sizes: int, noise: float = 0.1, seed: int = 0) -> Vectors:
    """Unit vectors around one axis per topic, topic after topic."""
    rng = np.random.default_rng(seed)
    centres = np.repeat(np.eye(8)[: len(sizes)], sizes, axis=0)
    vectors = centres + noise * rng.standard_normal(centres.shape)
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def test_segments_are_so_many_utterances_and_the_rest_is_one_when_asked_for() -> None:
    whole = split_segments(said(10), 4)
    partial = split_segments(said(10), 4, partial=True)
    assert partial[:2] == whole
    assert [(segment.start, segment.stop) for segment in partial] == [(0, 40), (40, 80), (80, 100)]
    assert partial[2].text == "u8\nu9"
    assert partial[2].transcript == "user: u8\nassistant: u9"
    assert split_segments([], 4, partial=True) == []


@given(st.integers(0, 40), st.integers(1, 9))
def test_partial_segments_hold_every_utterance_once(count: int, width: int) -> None:
    found = split_segments(said(count), width, partial=True)
    assert [each for segment in found for each in segment.utterances] == said(count)
    assert len(found) == -(-count // width)


def test_topics_become_episodes_in_the_order_in_which_they_come_up() -> None:
    vectors = topics(5, 9, 3, 7)
    found = cluster(vectors, 4, seed=3)
    assert found.labels == tuple(np.repeat(range(4), (5, 9, 3, 7)))
    assert found.members(1) == list(range(5, 14))
    np.testing.assert_allclose(found.centroids[2], vectors[14:17].mean(0), rtol=1e-5)
    assert found.centroids.dtype == np.float32


@pytest.mark.parametrize("count", [3, "auto"])
def test_the_same_seed_gives_the_same_episodes(count: int | Literal["auto"]) -> None:
    vectors = topics(6, 6, 6, 6, noise=0.6)
    once = cluster(vectors, count, seed=2**63)
    again = cluster(vectors, count, seed=2**63)
    assert once.labels == again.labels
    np.testing.assert_array_equal(once.centroids, again.centroids)


@pytest.mark.parametrize("sizes", [(6, 6), (4, 8, 5), (5, 5, 5, 5, 5, 5)])
def test_auto_finds_as_many_episodes_as_there_are_topics(sizes: tuple[int, ...]) -> None:
    assert len(cluster(topics(*sizes), "auto", seed=0).centroids) == len(sizes)


def test_auto_samples_a_long_conversation() -> None:
    found = cluster(topics(900, 900, 900), "auto", seed=0)
    assert len(found.centroids) == 3


@given(st.integers(1, 12), st.integers(1, 6) | st.just("auto"), st.integers(1, 4))
@settings(deadline=None, max_examples=30)
def test_there_are_never_empty_episodes(
    segments: int, count: int | Literal["auto"], distinct: int
) -> None:
    vectors = topics(*[1] * 8)[[n % distinct for n in range(segments)]]
    found = cluster(vectors, count, seed=1)
    assert set(found.labels) == set(range(len(found.centroids)))
    assert len(found.centroids) <= min(segments, distinct)
    assert len(found.labels) == segments


def test_the_medoid_is_the_member_nearest_to_the_centroid() -> None:
    vectors = topics(6, 6, noise=0.3)
    found = cluster(vectors, 2, seed=0)
    nearest = nearest_members(vectors, found, 1, 3)
    cosines = cosine(found.centroids[1], vectors)
    assert nearest == sorted(range(6, 12), key=lambda index: -cosines[index])[:3]


def test_of_equally_near_members_the_earlier_comes_first() -> None:
    vectors = np.ones((4, 2), dtype=np.float32)
    assert nearest_members(vectors, Clusters((0, 0, 0, 0), vectors[:1]), 0, 2) == [0, 1]


def plans(
    vectors: Vectors, labels: tuple[int, ...], medoid_utterances: int = 8, length: int = 10_000
) -> list:
    segments = split_segments(said(4 * len(labels)), 4)
    means = [vectors[[n == e for n in labels]].mean(0) for e in range(max(labels) + 1)]
    clusters = Clusters(labels, np.stack(means))
    return plan_episodes(
        segments,
        vectors,
        clusters,
        range(5000, 9000),
        medoid_utterances=medoid_utterances,
        length=length,
    )


def test_a_patched_prompt_is_the_nearest_segments_tokens_in_time_order() -> None:
    vectors = np.array([[1, 0], [0, 1], [0.9, 0.1], [0, 1], [0.5, 0.5], [0.7, 0.2]], np.float32)
    plan = plans(vectors, (0, 1, 0, 1, 0, 0))[0]
    # The mean is near (0.78, 0.2): segment 5 is nearest, then 2.
    assert plan.patched_prompt == (*range(5080, 5120), *range(5200, 5240))
    assert plan.medoid == "user: u20\nassistant: u21\nuser: u22\nassistant: u23"
    assert (plan.segments, plan.tokens) == (4, 160)


@pytest.mark.parametrize(("utterances", "segments"), [(1, 1), (4, 1), (5, 2), (8, 2), (400, 3)])
def test_a_patched_prompt_is_about_as_long_as_it_was_asked_to_be(
    utterances: int, segments: int
) -> None:
    plan = plans(topics(3, 3), (0, 0, 0, 1, 1, 1), utterances)[1]
    assert len(plan.patched_prompt) == 40 * segments


def test_an_episode_knows_how_near_each_segment_is() -> None:
    vectors = np.array([[1, 0], [0, 1], [0.9, 0.1], [0.5, 0.5]], np.float32)
    first, second = plans(vectors, (0, 1, 0, 1))
    assert first.spans == ((0, 40, 1.0), (40, 80, 0.0), (80, 120, 1.0), (120, 160, 0.25))
    assert [span[2] for span in second.spans] == [0.0, 1.0, 0.25, 1.0]
    assert plans(vectors, (0, 1, 0, 1), length=100)[0].spans == (
        (0, 40, 1.0),
        (40, 80, 0.0),
        (80, 100, 1.0),
    )
    assert len(plans(vectors, (0, 1, 0, 1), length=80)[0].spans) == 2


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(0, 1300))
def test_spans_cover_every_row_once_and_own_segments_are_nearest(
    labels: list[int], length: int
) -> None:
    order = {label: place for place, label in enumerate(dict.fromkeys(labels))}
    numbered = tuple(order[label] for label in labels)
    for episode, plan in enumerate(plans(topics(len(labels)), numbered, length=length)):
        assert sum(stop - start for start, stop, _ in plan.spans) == min(length, 40 * len(labels))
        assert all(before[1] == after[0] for before, after in pairwise(plan.spans))
        own = [label == episode for label in numbered[: len(plan.spans)]]
        assert [near == 1 for _, _, near in plan.spans] == own
        assert all(0 <= near <= 1 for _, _, near in plan.spans)


def test_a_query_goes_to_the_centroid_with_the_largest_cosine() -> None:
    centroids = np.array([[10, 0], [0.1, 0.1], [0, 3]], np.float32)
    found = match(np.array([1, 0.8], np.float32), centroids)
    assert found.episode == 1
    assert found.similarity == pytest.approx(0.9939, abs=1e-4)
    assert match(np.zeros(2, np.float32), centroids).similarity == 0


def test_new_segments_move_the_centroid_they_are_assigned_to() -> None:
    vectors = topics(6, 6, 4, noise=0.2)
    found = cluster(vectors[:12], 2, seed=0)
    new = np.concatenate([topics(2, 1, noise=0.2, seed=9), vectors[6:7]])
    assigned, sizes = assign(new, found.centroids, [6, 6])
    assert assigned.labels == (0, 0, 1, 1)
    assert sizes == [8, 8]
    np.testing.assert_allclose(
        assigned.centroids[0], np.concatenate([vectors[:6], new[:2]]).mean(0), atol=1e-6
    )
    np.testing.assert_allclose(
        assigned.centroids[1], np.concatenate([vectors[6:12], new[2:]]).mean(0), atol=1e-6
    )


def test_assigning_in_pieces_is_assigning_at_once() -> None:
    vectors = topics(20, 20, noise=0.5)[np.random.default_rng(0).permutation(40)]
    start = cluster(vectors[:10], 2, seed=0)
    sizes = [len(start.members(0)), len(start.members(1))]
    at_once, grown = assign(vectors[10:], start.centroids, sizes)
    first, between = assign(vectors[10:23], start.centroids, sizes)
    second, in_pieces = assign(vectors[23:], first.centroids, between)
    assert first.labels + second.labels == at_once.labels
    assert in_pieces == grown
    np.testing.assert_allclose(second.centroids, at_once.centroids, atol=1e-6)


@pytest.mark.parametrize(
    ("segments", "built", "length", "due"),
    [
        (7, 0, 1000, False),
        (8, 0, 1000, True),
        (8, 0, 100, False),
        (8, 0, 101, True),
        (9, 8, 1000, False),
        (10, 8, 1000, True),
        (100, 8, 50, True),
        (8, 8, 1000, False),
    ],
)
def test_episodes_are_built_when_there_is_enough_and_again_when_it_has_grown(
    segments: int, built: int, length: int, due: bool
) -> None:
    found = rebuild_due(
        EpisodeSettings(), segments=segments, built=built, length=length, budget=100
    )
    assert found is due


def test_settings_say_when_episodes_are_built() -> None:
    eager = EpisodeSettings(count=1, rebuild_growth=1.0)
    auto = EpisodeSettings(count="auto")
    assert rebuild_due(eager, segments=2, built=0, length=2, budget=1)
    assert not rebuild_due(eager, segments=3, built=2, length=2, budget=1)
    assert rebuild_due(eager, segments=4, built=2, length=2, budget=1)
    assert not rebuild_due(auto, segments=7, built=0, length=2, budget=1)
    assert rebuild_due(auto, segments=8, built=0, length=2, budget=1)


def test_vectors_come_back_from_bytes() -> None:
    vectors = topics(3, 2)
    data = vectors_to_bytes(vectors)
    assert len(data) == 5 * 8 * 4
    np.testing.assert_array_equal(vectors_from_bytes(data, 8), vectors)
    assert vectors_from_bytes(b"", 8).shape == (0, 8)


def test_a_segment_is_where_its_utterances_are() -> None:
    segment = Segment((Utterance("user", "a", 3, 5), Utterance("assistant", "b", 5, 9)))
    assert (segment.start, segment.stop) == (3, 9)


def test_own_segments_are_nearest_and_the_others_by_the_rank_of_their_cosine() -> None:
    vectors = np.array([[1, 0], [0.9, 0.1], [0, 1], [0.6, 0.4]], dtype=np.float32)
    clusters = Clusters((0, 0, 1, 1), np.stack([vectors[:2].mean(0), vectors[2:].mean(0)]))
    assert nearness(vectors, clusters, 0).tolist() == [1.0, 1.0, 0.0, 0.25]
    other = nearness(vectors, clusters, 1)
    assert other[2:].tolist() == [1.0, 1.0]
    assert 0 <= other[0] < other[1] < 1
