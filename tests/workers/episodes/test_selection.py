"""Selection of an episode's rows, and their replacement by newer ones."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from workers import methods
from workers.cache.active_cache import EMPTY
from workers.episodes.selection import LayerSelector, newest, select_from_all, select_with_newer
from workers.methods import Method
from workers.methods.epicache import EpiCache

PER_HEAD = EpiCache()
POOLED = EpiCache(whole_tokens=False)


def choice(method: Method = PER_HEAD, *, rows: int = 3, sinks: int = 0) -> LayerSelector:
    """One layer of a session."""
    return LayerSelector(method, rows, sinks)


def held(positions: Tensor) -> list[list[int]]:
    """Each head's positions, without the empty places."""
    return [[p for p in head if 0 <= p != EMPTY] for head in positions.tolist()]


def scores_of(*heads: list[float]) -> Tensor:
    """float32 `[n_kv_heads, n]`."""
    return torch.tensor(heads, dtype=torch.float32)


# Choosing among all rows


def test_each_head_keeps_its_best_rows_in_order() -> None:
    scores = scores_of([0.1, 0.9, 0.3, 0.0, 0.5], [0.5, 0.4, 0.0, 0.6, 0.1])
    assert select_from_all(scores, choice()).tolist() == [[1, 2, 4], [0, 1, 3]]


def test_a_method_that_pools_its_heads_shares_the_layers_rows_by_score() -> None:
    scores = scores_of([0.9, 0.8, 0.7, 0.6, 0.0], [0.5, 0.4, 0.0, 0.0, 0.1])
    assert held(select_from_all(scores, choice(POOLED))) == [[0, 1, 2, 3], [0, 1]]


def test_sinks_are_kept_whatever_they_score() -> None:
    scores = scores_of([0.0, 0.9, 0.8, 0.7, 0.0])
    assert select_from_all(scores, choice(sinks=1)).tolist() == [[0, 1, 2]]
    assert select_from_all(scores, choice()).tolist() == [[1, 2, 3]]


def test_a_conversation_within_the_budget_is_kept_whole() -> None:
    assert select_from_all(scores_of([0.2, 0.1], [0.0, 0.0]), choice()).tolist() == [[0, 1], [0, 1]]


# Newer rows beside an episode's


def test_newer_rows_replace_the_episodes_lowest_scores() -> None:
    positions = torch.tensor([[1, 4, 6, 7], [0, 2, 3, 5]], dtype=torch.int32)
    scores = scores_of([0.1, 0.9, 0.2, 0.8], [1.0, 0.0, 0.5, 0.4])
    newer = torch.tensor([[8, 9], [9, EMPTY]], dtype=torch.int32)
    chosen = select_with_newer(positions, scores, newer, choice(rows=4))
    assert held(chosen) == [[4, 7, 8, 9], [0, 3, 5, 9]]


def test_newer_rows_take_at_most_half_and_the_newest_stay() -> None:
    positions = torch.tensor([[0, 1, 2, 3]], dtype=torch.int32)
    newer = torch.arange(10, 20, dtype=torch.int32)[None]
    chosen = select_with_newer(positions, scores_of([0.4, 0.3, 0.2, 0.1]), newer, choice(rows=4))
    assert chosen.tolist() == [[0, 1, 18, 19]]


def test_an_episode_with_room_takes_newer_rows_and_keeps_its_own() -> None:
    positions = torch.tensor([[2, 5]], dtype=torch.int32)
    newer = torch.tensor([[8]], dtype=torch.int32)
    assert select_with_newer(positions, scores_of([0.5, 0.1]), newer, choice(rows=3)).tolist() == [
        [2, 5, 8]
    ]


def test_sinks_are_never_replaced() -> None:
    positions = torch.tensor([[0, 5, 6, 7]], dtype=torch.int32)
    newer = torch.tensor([[8, 9]], dtype=torch.int32)
    chosen = select_with_newer(
        positions, scores_of([0.0, 0.3, 0.2, 0.1]), newer, choice(rows=4, sinks=1)
    )
    assert chosen.tolist() == [[0, 5, 8, 9]]


@settings(deadline=None, max_examples=60)
@given(data=st.data(), pooled=st.booleans())
def test_with_any_newer_rows_the_layer_stays_within_its_budget(
    data: st.DataObject, pooled: bool
) -> None:
    heads = 2
    built = 24
    end = 40
    rows = data.draw(st.integers(1, 30), label="rows per head")
    method = POOLED if pooled else PER_HEAD
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99), label="seed"))
    scores = torch.rand(heads, built, generator=generator)
    episode = select_from_all(scores, choice(method, rows=rows))
    own = torch.where(episode < 0, EMPTY, episode).to(torch.int32)
    newer = [
        sorted(data.draw(st.sets(st.integers(built, end - 1)), label="newer")) for _ in range(heads)
    ]
    width = max(map(len, newer))
    after = torch.tensor(
        [head + [EMPTY] * (width - len(head)) for head in newer], dtype=torch.int32
    ).view(heads, -1)
    chosen = held(
        select_with_newer(
            own, scores.gather(1, episode.clamp(min=0)), after, choice(method, rows=rows)
        )
    )
    assert sum(map(len, chosen)) <= heads * rows
    for before, came, now in zip(held(own), newer, chosen, strict=True):
        assert now == sorted(set(now))
        assert set(now) <= set(before) | set(came)
        assert [p for p in now if p >= built] == came[len(came) - min(len(came), rows // 2) :]


# Which rows are newest


def test_only_each_heads_last_positions_are_newest() -> None:
    positions = torch.tensor([[3, 5, 8, EMPTY], [1, EMPTY, EMPTY, EMPTY]], dtype=torch.int32)
    assert held(newest(positions, 2)) == [[5, 8], [1]]
    assert held(newest(positions, 0)) == [[], []]


def test_every_method_that_evicts_can_choose_an_episodes_rows(
    make_methods: Callable[[], list[Method]],
) -> None:
    scores = torch.rand(2, 50, generator=torch.Generator().manual_seed(3))
    for method in make_methods():
        chosen = held(select_from_all(scores, choice(method, rows=20, sinks=2)))
        assert 0 < sum(map(len, chosen)) <= 40
        assert all({0, 1} <= set(head) for head in chosen), method.name


@pytest.fixture
def make_methods() -> Callable[[], list[Method]]:
    """make_methods(): every method that evicts, with its default settings."""
    return lambda: [method for name in methods.METHODS if (method := methods.build(name)).evicts]
