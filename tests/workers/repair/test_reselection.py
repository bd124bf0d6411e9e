"""While it answers, a session's own queries select its rows anew among all that are stored."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kvrecall.domain.settings.reselection import Reselection
from tests.workers.drive import drive
from tests.workers.repair.reselections import SMALL, active, run, speak, stored_keys
from workers.engine.eviction_scores import EvictionScores
from workers.generation.settling import drop_rows
from workers.methods import METHODS, build
from workers.primitives.observation import Observed
from workers.primitives.scoring import attention
from workers.repair.observe import observe_contrast
from workers.repair.reselection import due

EVICTING = [name for name in METHODS if build(name).evicts]
NEAR = {"before": 1, "after": 2, "fade_before": 0.5, "fade_after": 0.5}
EVERY_4 = '{"reselect": {"every": 4, "first": 4}}'


# When


def test_it_is_due_after_the_first_tokens_and_then_at_even_distances() -> None:
    assert [n for n in range(30) if due(Reselection(every=8, first=3), n)] == [3, 11, 19, 27]
    assert [n for n in range(30) if due(Reselection(every=8, first=0), n)] == [0, 8, 16, 24]
    assert [n for n in range(40) if due(Reselection(every=16, first=16), n)] == [16, 32]
    assert not any(due(None, n) for n in range(40))


@pytest.mark.parametrize(("tokens", "count"), [(3, 0), (5, 0), (6, 1), (9, 1), (10, 2), (20, 4)])
def test_an_answer_re_selects_before_the_tokens_that_follow(
    tokens: int, count: int, make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    """After 4 tokens have rows, if the answer goes on: its fifth token is sampled, but not its last."""
    worker = make_worker(block_tokens=32, recent=8)
    worker.open(**SMALL)
    done = worker.turn("s", words(90), max_tokens=tokens)
    assert done.output_tokens == tokens, "the words of this test are answered at length"
    assert done.reselections.count == count
    assert done.HasField("reselections") == bool(count)
    worker.check()


def test_without_a_first_token_the_prompt_selects_at_its_end(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    """What was evicted before the end of the prompt may return before the answer."""
    worker = make_worker(block_tokens=32, recent=8)
    worker.open(**{**SMALL, "method_settings": '{"every": 16, "first": 0, "window": 8}'})
    done = worker.turn("s", words(90), max_tokens=10)
    assert done.output_tokens == 10, "the words of this test are answered at length"
    assert done.reselections.count == 1
    assert done.reselections.rows_in > 0


# What


@pytest.mark.parametrize("family", ["reference", "llama", "qwen3"])
def test_within_the_budget_an_answer_is_that_of_the_full_cache(
    family: str,
    make_worker: Callable[..., Any],
    words: Callable[..., str],
    continuation: Callable[..., list[int]],
    answer: Callable[..., list[int]],
) -> None:
    worker = make_worker(family, block_tokens=64)
    worker.open(method="loopserve", method_settings='{"every": 1, "first": 1}')
    done = worker.turn("s", words(150), max_tokens=24)
    assert answer(done) == continuation(family, done.token_ids[: done.prompt_tokens], 24)
    assert not done.HasField("reselections"), "no row was ever evicted"


def test_a_budget_that_holds_all_restores_the_full_cache_bit_for_bit(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker(block_tokens=64)
    worker.open(method="loopserve", budget=400, method_settings='{"every": 16, "first": 16}')
    worker.turn("s", words(120), generate=False)
    resident = speak(worker, 16)
    cache = worker.engine.cache
    before = [[each.clone() for each in cache.get_rows(resident.slot, n)] for n in range(2)]
    generator = torch.Generator().manual_seed(3)
    length = resident.session.length
    for layer in range(2):
        kept = [torch.randperm(length, generator=generator)[:40].sort().values for _ in range(2)]
        cache.keep(resident.slot, layer, torch.stack(kept))
    report = run(worker, resident, 16)
    assert (report.count, report.rows_in, report.rows_out) == (1, 4 * (length - 40), 0)
    for layer, rows in enumerate(before):
        for was, now in zip(rows, cache.get_rows(resident.slot, layer), strict=True):
            assert torch.equal(was, now)


@pytest.mark.parametrize("tokens", [1, 4, 16])
@pytest.mark.parametrize("group", ["mean", "max"])
@pytest.mark.parametrize(
    ("token_share", "contrast"), [(0, 1), (0.25, 1), (0.5, 0), (0.5, 1), (1, 1)]
)
def test_the_rows_are_the_best_of_each_head_over_the_keys_of_the_full_cache(
    tokens: int,
    group: str,
    token_share: float,
    contrast: float,
    make_worker: Callable[..., Any],
    words: Callable[..., str],
) -> None:
    """By brute force: the causal softmax over all keys, the largest of the newest tokens' weights.

    A token counts 0.85 of the next one.

    Of whole tokens the mean over all layers and heads, less that of an empty message and spread as
    in the session's repairs; they come after the heads' own rows.
    """
    budget, sinks, recent = 40, 2, 16
    worker = make_worker(block_tokens=64, sinks=sinks, recent=recent, turn_share=0.0)
    settings = f'{{"every": {tokens}, "first": 4, "window": 16, "pool": 1, "group": "{group}"}}'
    reselect = {"every": tokens, "first": 4, "token_share": token_share}
    options = json.dumps({"reselect": reselect})
    worker.open(
        method="loopserve",
        budget=budget,
        method_settings=settings,
        options=options,
        repair_settings=json.dumps({**NEAR, "contrast": contrast}),
    )
    worker.turn("s", words(300), generate=False)
    resident = speak(worker, 20)
    queries = 8 if token_share else max(8, tokens)
    observed = resident.session.queries.observed().last(queries)
    neutral = drive(observe_contrast(worker.engine, resident))[0] if contrast else None
    run(worker, resident, 20)
    keys = stored_keys(worker)
    length = keys.shape[2]
    positions = torch.arange(length).expand(2, -1)

    def attended(by: Observed, decay: float = 1.0) -> Tensor:
        each = [attention(by.queries[n], keys[n], positions, by.positions) for n in range(2)]
        ages = torch.arange(by.tokens - 1, -1, -1)
        by_query = (torch.stack(each) * decay ** ages[:, None]).amax(3)
        return by_query.mean(2) if group == "mean" else by_query.amax(2)

    scores = attended(observed, 0.85)
    stand_out = scores.mean((0, 1))
    if neutral is not None:
        stand_out = (stand_out - attended(neutral.neutral).mean((0, 1))).clamp(min=0)
    means = [0.0] * sinks + stand_out.tolist()[sinks:]
    near = [range(max(0, p - 2), min(length, p + 2)) for p in range(length)]
    utility = [max(means[a] * 0.5 ** abs(p - a) for a in near[p]) for p in range(length)]
    stay = {*range(sinks), *range(length - recent, length)}
    for found, of_layer in zip(active(worker), scores.tolist(), strict=True):
        for rows, score in zip(found, of_layer, strict=True):
            free = budget - len(stay)
            rest = sorted(set(range(length)) - stay, key=lambda p: (-score[p], p))
            own = rest[: int((1 - token_share) * free)]
            others = sorted(set(rest) - set(own), key=lambda p: (-utility[p], p))
            assert rows == sorted([*stay, *own, *others[: free - len(own)]])


@pytest.mark.parametrize("method", EVICTING)
def test_whole_tokens_are_the_same_in_every_layer_and_head(
    method: str, make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker(block_tokens=32, recent=8)
    options = '{"reselect": {"every": 4, "first": 4, "token_share": 1}}'
    worker.open(method=method, budget=48, layer_budgets="uniform", options=options)
    worker.turn("s", words(150), generate=False)
    run(worker, speak(worker, 4), 4)
    found = active(worker)
    (rows,) = set(worker.engine.sessions["s"].config.layer_rows)
    assert len(found[0][0]) == rows
    assert found == [[found[0][0]] * 2] * 2


@pytest.mark.parametrize(
    ("method", "settings", "options"),
    [
        ("loopserve", '{"every": 1, "first": 1, "window": 1}', ""),
        ("adakv", '{"window": 1}', '{"reselect": {"every": 1, "first": 1}}'),
    ],
)
def test_rows_of_equal_score_are_taken_from_the_beginning(
    method: str, settings: str, options: str, make_worker: Callable[..., Any]
) -> None:
    """Heads that attend to nothing in particular: zero queries give every row the same weight."""
    worker = make_worker(block_tokens=64, sinks=0, recent=4, turn_share=0.0)
    worker.open(
        method=method,
        budget=20,
        method_settings=settings,
        options=options,
        repair_settings='{"contrast": 0}',
    )
    worker.turn("s", "the river " * 60, generate=False)
    resident = speak(worker, 1)
    observed = resident.session.queries.observed()
    resident.session.queries.clear()
    resident.session.queries.push(
        torch.zeros_like(torch.stack(observed.queries)), observed.positions
    )
    run(worker, resident, 1)
    length = resident.session.length
    # The observation window of one token is among the recent rows.
    expected = [*range(16), *range(length - 4, length)]
    assert active(worker) == [[expected] * 2] * 2


def test_sinks_do_not_bring_their_neighbours(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    """Queries that are the first row's key: they attend to it most, as all do to a sink."""
    worker = make_worker(block_tokens=64, sinks=1, recent=4, turn_share=0.0)
    worker.open(method="tova", budget=20, options='{"reselect": {"every": 1, "first": 1}}')
    worker.turn("s", words(150), generate=False)
    resident = speak(worker, 1)
    positions = resident.session.queries.observed().positions
    resident.session.queries.clear()
    first = stored_keys(worker)[:, :, :1].repeat_interleave(2, 1)
    resident.session.queries.push(first, positions)
    run(worker, resident, 1)
    assert not set(range(1, 15)) <= set(active(worker)[0][0])


def test_the_prompt_of_the_turn_is_not_protected_whole(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    """The newest rows of the turn stay, up to its share of the budget; its others are candidates."""
    worker = make_worker(block_tokens=32, sinks=2, recent=4, turn_share=0.5)
    worker.open(method="loopserve", budget=40, method_settings='{"every": 4, "first": 4}')
    worker.turn("s", words(120), generate=False)
    engine = worker.engine
    resident = engine.swap_in(engine.session("s"))
    resident.session.clear_turn()
    resident.session.turn_start = 0
    for token in range(40, 44):
        engine.forward([resident], torch.tensor([[token]]))
    run(worker, resident, 4)
    newest = resident.session.length - (20 - 2 - 4)
    for layer in active(worker):
        for rows in layer:
            assert len(rows) == 40
            assert rows[-14:] == list(range(newest, resident.session.length))


def test_rows_that_a_repair_promoted_become_ordinary_and_the_reserve_is_used(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker(block_tokens=32, recent=8)
    worker.open(**{**SMALL, "budget": 64, "repair_rows": 16})
    worker.turn("s", words(150), generate=False)
    worker.repair("s", text=words(6, seed=5))
    assert worker.memory().promoted_rows == 16
    resident = speak(worker, 4)
    run(worker, resident, 4)
    assert resident.session.promoted_rows == 0
    assert worker.engine.cache.rows_per_head(resident.slot) == [64, 64]
    rows = [worker.engine.cache.read(resident.slot, layer) for layer in range(2)]
    assert not any(bool(each.promoted.any()) for each in rows)
    drop_rows(worker.engine, resident, 128)
    done = worker.turn("s", words(10, seed=6), max_tokens=4)
    assert max(done.memory.active_rows) <= 48, (
        "the next turn ends within the budget less the reserve"
    )


def test_a_repair_knows_the_scores_of_rows_that_a_re_selection_evicted(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker(block_tokens=32, recent=8)
    worker.open(**SMALL)
    worker.turn("s", words(150), generate=False)
    resident = speak(worker, 4)
    resident.session.eviction_scores = EvictionScores()
    before = active(worker)
    run(worker, resident, 4)
    gone = {
        position
        for was, now in zip(before, active(worker), strict=True)
        for head, kept in zip(was, now, strict=True)
        for position in set(head) - set(kept)
    }
    recorded = resident.session.eviction_scores
    assert len(recorded.tokens) == min(len(gone), 48)
    assert set(recorded.tokens.tolist()) <= gone
    assert bool((recorded.scores > 0).all())


@pytest.mark.parametrize("method", EVICTING)
def test_any_method_that_evicts_may_re_select(
    method: str, make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker(block_tokens=32, recent=8, layer_sensitivity=(0.5, 1.0))
    worker.open(method=method, budget=60, options=EVERY_4, repair_rows=12)
    said = worker.turn("s", words(120), repair=True, max_tokens=18)
    assert said.reselections.count == (said.output_tokens - 2) // 4 > 0
    assert all(
        peak <= bound
        for peak, bound in zip(said.memory.peak_rows, said.memory.bound_rows, strict=True)
    )
    worker.check()
