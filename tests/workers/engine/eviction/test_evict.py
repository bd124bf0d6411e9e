"""Eviction brings a session into its budget and keeps what is protected."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvrecall.domain.episodes import ActiveEpisode
from workers import methods
from workers.cache.active_cache import EMPTY, ActiveCache
from workers.cache.forward_step import ForwardStep
from workers.engine.eviction import evict as eviction
from workers.engine.session import ResidentSession, SessionConfig, WorkerSession
from workers.engine.settings import WorkerSettings

SETTINGS = WorkerSettings(sinks=2, recent=3, turn_share=0.5)


@pytest.fixture
def resident(
    make_cache: Callable[..., ActiveCache],
) -> Callable[..., tuple[ActiveCache, ResidentSession]]:
    """resident(method, tokens, budget): a session with that many random rows in a slot."""

    def make(
        method: str, tokens: int, budget: int, **session: Any
    ) -> tuple[ActiveCache, ResidentSession]:
        cache = make_cache(slots=1, rows=(64, 64))
        slot = cache.claim([64, 64])
        step = ForwardStep(cache, [slot], torch.arange(tokens)[None])
        generator = torch.Generator().manual_seed(tokens)
        for layer in range(2):
            step.update(*torch.randn(2, 1, 2, tokens, 4, generator=generator), layer)
        built = methods.build(method)
        repair_rows = session.pop("repair_rows", 0)
        config = SessionConfig(
            name="s",
            epoch=1,
            budget=budget,
            repair_rows=repair_rows,
            method=built,
            seed=3,
            layer_rows=session.pop("layer_rows", (budget - repair_rows,) * 2),
        )
        made = WorkerSession.create(config)
        made.length = tokens
        made.slot = slot
        for name, value in session.items():
            setattr(made, name, value)
        return cache, ResidentSession(made)

    return make


def evict(
    cache: ActiveCache,
    resident: ResidentSession,
    settings: WorkerSettings,
    *,
    turn_over: bool = False,
) -> None:
    """Evict as the engine does for a method that observes the turn's last queries."""
    if eviction.over_budget(cache, resident):
        observed = resident.session.queries.observed()
        eviction.evict(cache, resident, settings, observed, turn_over=turn_over)


def _held(cache: ActiveCache, layer: int, head: int) -> list[int]:
    positions = cache.read(0, layer).positions[head]
    return positions[positions != EMPTY].tolist()


def test_nothing_is_evicted_within_the_budget(resident: Callable[..., Any]) -> None:
    cache, session = resident("random", tokens=20, budget=20)
    evict(cache, session, SETTINGS)
    assert cache.longest_heads(0) == [20, 20]
    assert not len(session.session.eviction_scores.tokens)


def test_a_method_that_does_not_evict_keeps_every_row(resident: Callable[..., Any]) -> None:
    cache, session = resident("full", tokens=20, budget=6)
    evict(cache, session, SETTINGS)
    assert cache.longest_heads(0) == [20, 20]


@pytest.mark.parametrize("method", ["streaming_llm", "snapkv", "random"])
def test_sinks_recent_rows_and_the_turns_share_stay(
    method: str, resident: Callable[..., Any]
) -> None:
    cache, session = resident(method, tokens=60, budget=20, turn_start=40)
    evict(cache, session, SETTINGS)
    share = 10 - 2 - 3
    for layer in range(2):
        for head in range(2):
            held = _held(cache, layer, head)
            assert len(held) == 20
            assert {0, 1, *range(60 - max(3, share), 60)} <= set(held)


def test_when_a_turn_is_over_its_rows_are_rows_like_any_other(resident: Callable[..., Any]) -> None:
    during, over = (resident("random", tokens=60, budget=20, turn_start=50) for _ in range(2))
    settings = WorkerSettings(sinks=0, recent=0, turn_share=0.5)
    evict(during[0], during[1], settings)
    evict(over[0], over[1], settings, turn_over=True)
    assert set(range(50, 60)) <= set(_held(during[0], 0, 0))
    assert not set(range(50, 60)) <= set(_held(over[0], 0, 0))
    assert len(_held(over[0], 0, 0)) == 20


def test_promoted_rows_are_not_evicted_while_they_are_promoted(
    resident: Callable[..., Any],
) -> None:
    for method in ("streaming_llm", "random"):
        cache, session = resident(method, tokens=60, budget=20, promoted_rows=3)
        for layer in range(2):
            cache.read(0, layer).promoted[:, [10, 11, 30]] = True
        evict(cache, session, SETTINGS)
        assert {10, 11, 30} <= set(_held(cache, 1, 1))
        cache.check_integrity()


def test_streaming_with_more_sinks_than_budget_still_keeps_what_is_protected(
    resident: Callable[..., Any],
) -> None:
    cache, session = resident("streaming_llm", tokens=60, budget=20, promoted_rows=1)
    method = methods.build("streaming_llm", '{"sinks": 40}')
    session.session.config = replace(session.config, method=method)
    for layer in range(2):
        cache.read(0, layer).promoted[:, 30] = True
    evict(cache, session, SETTINGS)
    assert _held(cache, 0, 0) == [*range(10), 30, *range(51, 60)]


def test_the_reserve_for_repair_stays_free_until_rows_are_promoted(
    resident: Callable[..., Any],
) -> None:
    cache, session = resident("random", tokens=60, budget=20, repair_rows=6)
    evict(cache, session, SETTINGS)
    assert cache.longest_heads(0) == [14, 14]


def test_each_evicted_token_has_the_mean_score_of_its_eviction(
    resident: Callable[..., Any],
) -> None:
    cache, session = resident("random", tokens=40, budget=12)
    scores = []
    for layer in range(2):
        keys, values, positions = cache.get_rows(0, layer)
        rows = methods.LayerRows(
            layer,
            keys,
            values,
            positions,
            keys[:0],
            positions[0, :0],
            torch.zeros(2),
            end=40,
            seed=3 + 40,
        )
        scores.append(session.config.method.scores(rows))
    evict(cache, session, SETTINGS)
    expected = torch.zeros(40)
    for layer in range(2):
        for head in range(2):
            gone = sorted(set(range(40)) - set(_held(cache, layer, head)))
            expected[gone] += scores[layer][head, gone] / 4
    found = session.session.eviction_scores
    best = expected.sort(descending=True, stable=True).indices[:12].sort().values
    assert found.tokens.tolist() == best.tolist(), "as many as the budget has rows"
    assert torch.allclose(found.scores, expected[best], atol=1e-6)


def test_an_eviction_is_the_same_every_time(resident: Callable[..., Any]) -> None:
    caches = []
    for _ in range(2):
        cache, session = resident("random", tokens=60, budget=20)
        evict(cache, session, SETTINGS)
        caches.append([_held(cache, layer, head) for layer in range(2) for head in range(2)])
    assert caches[0] == caches[1]
    assert len({tuple(rows) for rows in caches[0]}) == 4, "layers and heads draw their own"


def test_each_layer_keeps_its_own_budget(resident: Callable[..., Any]) -> None:
    cache, session = resident("random", tokens=60, budget=20, layer_rows=(30, 10))
    evict(cache, session, SETTINGS)
    assert cache.rows_per_head(0) == [30, 10]
    cache.check_integrity()


def test_a_layer_within_its_budget_does_not_change(resident: Callable[..., Any]) -> None:
    cache, session = resident("random", tokens=25, budget=20, layer_rows=(30, 10))
    evict(cache, session, SETTINGS)
    assert cache.rows_per_head(0) == [25, 10]
    gone = set(range(25)) - set(_held(cache, 1, 0)) - set(_held(cache, 1, 1))
    assert set(session.session.eviction_scores.tokens.tolist()) >= gone


def test_the_turns_share_is_of_each_layers_budget(resident: Callable[..., Any]) -> None:
    cache, session = resident("random", tokens=60, budget=25, layer_rows=(40, 10), turn_start=30)
    evict(cache, session, WorkerSettings(sinks=0, recent=0, turn_share=0.5))
    assert set(range(40, 60)) <= set(_held(cache, 0, 0))
    assert set(range(55, 60)) <= set(_held(cache, 1, 0))
    assert not set(range(50, 60)) <= set(_held(cache, 1, 0)) | set(_held(cache, 1, 1))


def test_layers_that_share_a_selection_hold_the_same_positions(
    resident: Callable[..., Any],
) -> None:
    """The first layer selects; another one with fewer rows keeps the selected rows that it has."""
    cache, session = resident("chunkkv", tokens=60, budget=20)
    cache.keep(0, 1, torch.arange(5, 60).repeat(2, 1))
    evict(cache, session, SETTINGS)
    for head in range(2):
        first = _held(cache, 0, head)
        assert len(first) == 20
        assert _held(cache, 1, head) == [position for position in first if position >= 5]
    assert _held(cache, 0, 0) != _held(cache, 1, 0), "position 0 is a sink"


# Through the scheduler

LIMITS = {"block_tokens": 24, "recent": 8, "sinks": 2, "prompt_tokens": 30}
EVICTING = [name for name, method in methods.METHODS.items() if method.evicts]


@pytest.mark.parametrize("layer_budgets", ["", "pyramid", "sensitivity"])
@pytest.mark.parametrize("method", EVICTING)
def test_no_layer_ever_exceeds_its_budget_and_a_block(
    method: str, layer_budgets: str, make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    """Through long prompts and long answers, whatever the method observes and how the budget is split."""
    worker = make_worker("qwen2", layer_sensitivity=(0.0, 0.5, 0.3), **LIMITS)
    worker.open(method=method, budget=50, repair_rows=10, layer_budgets=layer_budgets)
    session = worker.engine.session("s")
    session.episode = ActiveEpisode(patched_prompt=tuple(range(60, 100)))
    prompt = 30 if session.config.method.observation.uses_patched_prompt else 0
    for number in range(2):
        memory = worker.turn("s", words(90, seed=number), max_tokens=30).memory
        retrieved = session.config.retrieved
        assert sum(session.config.layer_rows) == 3 * (40 - retrieved)
        assert list(memory.bound_rows) == [
            rows + 10 + retrieved + 24 + prompt for rows in session.config.layer_rows
        ]
        assert all(
            peak <= bound for peak, bound in zip(memory.peak_rows, memory.bound_rows, strict=True)
        )
        left = [
            rows - n for n, rows in zip(memory.active_rows, session.config.layer_rows, strict=True)
        ]
        # Those behind the last whole page are not active before the next turn.
        assert all(
            0 <= rows <= memory.unsettled + (9 if method == "chunkkv" else 0) for rows in left
        ), "chunks stay or go whole"
        worker.check()
        memory = worker.repair("s", text=words(5, seed=9)).memory
        assert all(
            n <= rows + 10
            for n, rows in zip(memory.active_rows, session.config.layer_rows, strict=True)
        )
        worker.check()


@pytest.mark.parametrize("method", ["adakv", "kvzip"])
def test_uneven_heads_take_no_more_memory_than_even_ones(
    method: str, make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker(**LIMITS)
    where = [tensor.data_ptr() for tensor in worker.engine.cache.pool.memories[0].tensors()]
    held = {}
    for name in (method, "snapkv"):
        worker.open(name, method=name, budget=40)
        held[name] = worker.turn(name, words(150, seed=1), max_tokens=40).memory
    lengths = worker.engine.cache.lengths[:, worker.engine.session(method).slot]
    assert not bool((lengths[:, 0] == lengths[:, 1]).all()), "heads of different lengths"
    assert all(0 < rows <= 80 for rows in lengths.sum(-1).tolist())
    row_bytes = worker.engine.model.shape.row_bytes(torch.float32)
    assert all(memory.active_bytes <= 160 * row_bytes for memory in held.values())
    assert [tensor.data_ptr() for tensor in worker.engine.cache.pool.memories[0].tensors()] == where
    worker.check()


def test_shared_layers_hold_the_same_positions_through_turns_and_repairs(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker("qwen2", **LIMITS)
    worker.open(method="chunkkv", budget=50, repair_rows=10, layer_budgets="pyramid")
    session = worker.engine.session("s")
    cache = worker.engine.cache
    for number in range(2):
        worker.turn("s", words(90, seed=number), max_tokens=40)
        worker.repair("s", text=words(5, seed=9))
        first, second, third = (cache.get_rows(session.slot, layer)[2] for layer in range(3))
        assert torch.equal(first, second)
        assert not torch.equal(second, third)


@pytest.mark.parametrize("reserve", [0, 6])
def test_a_layer_that_shares_a_selection_keeps_what_was_promoted_in_it_alone(
    reserve: int, resident: Callable[..., Any]
) -> None:
    cache, session = resident(
        "chunkkv", tokens=60, budget=20, repair_rows=reserve, promoted_rows=reserve
    )
    cache.read(0, 1).promoted[:, [10, 11, 30]] = True
    evict(cache, session, SETTINGS)
    first, second = ([set(_held(cache, layer, head)) for head in range(2)] for layer in range(2))
    for head in range(2):
        assert {10, 11, 30} <= second[head]
        assert len(second[head]) <= 20
        assert second[head] - {10, 11, 30} <= first[head], "nothing else is its own"
        assert {0, 1, 57, 58, 59} <= second[head], "sinks and recent rows stay"
    cache.check_integrity()
