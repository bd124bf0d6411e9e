"""A repair scores everything that is missing and brings the best back, exactly as it was."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kvstore.store import RowStore
from workers import methods
from workers.cache import EMPTY, ActiveCache, RowShape
from workers.model import LoadedModel
from workers.observation import Observed, RecentQueries
from workers.repair import choose, missing_rows, promote, score_rows, withdraw
from workers.session import Selection, WorkerSession
from workers.settings import WorkerSettings


@pytest.fixture
def stored(
    loaded: Callable[[str], LoadedModel], open_store: Callable[..., RowStore]
) -> Callable[..., tuple[RowStore, Tensor]]:
    """stored(tokens): a store with random rows of session "s", and these rows `[L, 2, n_kv_heads, tokens, d]`."""

    def make(tokens: int) -> tuple[RowStore, Tensor]:
        store = open_store(loaded("llama"))
        rows = torch.randn(store.layout.rows_shape(tokens), generator=torch.Generator().manual_seed(1))
        store.append("s", rows)
        return store, rows

    return make


def seat(shape: RowShape, rows: Tensor, held: list[list[list[int]]], **session: Any) -> tuple[ActiveCache, Any]:
    """A cache whose one slot holds the rows at `held[layer][head]`, and its session."""
    length = rows.shape[3]
    cache = ActiveCache(shape, 1, [length] * shape.n_layers)
    slot = cache.claim([length] * shape.n_layers)
    for layer, heads in enumerate(held):
        width = max(map(len, heads))
        positions = torch.tensor([head + [EMPTY] * (width - len(head)) for head in heads], dtype=torch.int32)
        keys, values = torch.zeros(2, shape.n_kv_heads, width, shape.head_dim)
        for head, kept in enumerate(heads):
            keys[head, : len(kept)] = rows[layer, 0, head, kept]
            values[head, : len(kept)] = rows[layer, 1, head, kept]
        cache.insert(slot, layer, positions, keys, values, torch.zeros_like(positions, dtype=torch.bool))
    worker_session = WorkerSession(
        name="s",
        epoch=1,
        budget=session.pop("budget", length),
        repair_rows=session.pop("repair_rows", 8),
        method=methods.build("snapkv"),
        seed=0,
        tools=[],
        queries=RecentQueries(0),
        layer_rows=(length,) * shape.n_layers,
        length=length,
        slot=slot,
    )
    return cache, worker_session


UNEVEN = [[[0, 1, 5, 9, 30], [2, 3]], [[4, 7, 8], [0, 9, 10, 29]]]


def test_missing_rows_are_those_that_a_head_does_not_hold(
    stored: Callable[..., tuple[RowStore, Tensor]], loaded: Callable[[str], LoadedModel]
) -> None:
    _, rows = stored(31)
    cache, _ = seat(loaded("llama").shape, rows, UNEVEN)
    missing = missing_rows(cache, 0, 31)
    for layer, heads in enumerate(UNEVEN):
        for head, kept in enumerate(heads):
            assert missing[layer, head].nonzero().flatten().tolist() == sorted(set(range(31)) - set(kept))


@pytest.mark.parametrize("tokens", [31, 1300])
def test_scores_are_the_softmax_over_all_rows_counted_where_a_row_is_missing(
    tokens: int, stored: Callable[..., tuple[RowStore, Tensor]], loaded: Callable[[str], LoadedModel]
) -> None:
    """Streamed over several chunks of pages when there are more rows than a chunk."""
    store, rows = stored(tokens)
    shape = loaded("llama").shape
    cache, _ = seat(shape, rows, UNEVEN)
    missing = missing_rows(cache, 0, tokens)
    queries = torch.randn(shape.n_layers, shape.n_heads, 3, shape.head_dim, generator=torch.Generator().manual_seed(2))
    scores = score_rows(Observed(tuple(queries), torch.arange(tokens, tokens + 3)), store, "s", missing)
    expected = torch.zeros(tokens)
    for layer in range(shape.n_layers):
        for head in range(shape.n_heads):
            kv_head = head // shape.group
            attention = (queries[layer, head] @ rows[layer, 0, kv_head].T / math.sqrt(shape.head_dim)).softmax(-1)
            expected += attention.amax(0) * missing[layer, kv_head]
    assert torch.allclose(scores, expected / (shape.n_layers * shape.n_heads), atol=1e-6)


def test_the_rows_to_promote_are_bursts_of_what_is_missing_somewhere(
    stored: Callable[..., tuple[RowStore, Tensor]], loaded: Callable[[str], LoadedModel]
) -> None:
    _, rows = stored(31)
    everywhere = [list(range(10))] * 2
    cache, session = seat(loaded("llama").shape, rows, [everywhere, everywhere], repair_rows=5)
    missing = missing_rows(cache, 0, 31)
    scores = torch.zeros(31)
    scores[3], scores[20] = 9, 1
    settings = WorkerSettings(burst_before=1, burst_after=2)
    assert choose(scores, missing, session, settings).tolist() == [10, 19, 20, 21, 22]


def test_the_score_of_the_eviction_breaks_ties(
    stored: Callable[..., tuple[RowStore, Tensor]], loaded: Callable[[str], LoadedModel]
) -> None:
    _, rows = stored(31)
    nothing = [[0], [0]]
    cache, session = seat(loaded("llama").shape, rows, [nothing, nothing], repair_rows=2)
    session.scores_of_evicted()[[7, 25]] = torch.tensor([0.5, 0.25])
    chosen = choose(torch.zeros(31), missing_rows(cache, 0, 31), session, WorkerSettings(burst_before=0, burst_after=0))
    assert chosen.tolist() == [7, 25]


def test_promoted_rows_come_back_bit_by_bit_where_they_are_missing(
    stored: Callable[..., tuple[RowStore, Tensor]], loaded: Callable[[str], LoadedModel]
) -> None:
    store, rows = stored(31)
    cache, session = seat(loaded("llama").shape, rows, UNEVEN)
    chosen = torch.tensor([0, 3, 9, 20])
    promote(cache, store, session, chosen, missing_rows(cache, 0, 31))
    cache.check_integrity()
    assert session.promoted_rows == 4
    for layer, heads in enumerate(UNEVEN):
        keys, values, positions = cache.rows_of(0, layer)
        for head, kept in enumerate(heads):
            now = sorted({*kept, *chosen.tolist()})
            assert positions[head, : len(now)].tolist() == now
            assert torch.equal(keys[head, : len(now)], rows[layer, 0, head, now])
            assert torch.equal(values[head, : len(now)], rows[layer, 1, head, now])
            flags = cache.read(0, layer).promoted[head, : len(now)].tolist()
            assert flags == [position not in kept for position in now]


def test_withdrawing_leaves_the_selection_that_was_there_before(
    stored: Callable[..., tuple[RowStore, Tensor]], loaded: Callable[[str], LoadedModel]
) -> None:
    store, rows = stored(31)
    cache, session = seat(loaded("llama").shape, rows, UNEVEN)
    before = Selection.of_slot(cache, 0)
    promote(cache, store, session, torch.tensor([0, 3, 9, 20]), missing_rows(cache, 0, 31))
    withdraw(cache, session)
    cache.check_integrity()
    assert Selection.of_slot(cache, 0).to_bytes() == before.to_bytes()
    for layer, heads in enumerate(UNEVEN):
        for head, kept in enumerate(heads):
            assert torch.equal(cache.rows_of(0, layer)[0][head, : len(kept)], rows[layer, 0, head, kept])
    assert session.promoted_rows == 0


def test_promoting_nothing_is_harmless(
    stored: Callable[..., tuple[RowStore, Tensor]], loaded: Callable[[str], LoadedModel]
) -> None:
    store, rows = stored(31)
    cache, session = seat(loaded("llama").shape, rows, UNEVEN)
    before = Selection.of_slot(cache, 0)
    promote(cache, store, session, torch.empty(0, dtype=torch.int64), missing_rows(cache, 0, 31))
    assert Selection.of_slot(cache, 0).to_bytes() == before.to_bytes()


def test_a_row_that_the_signal_attends_to_is_found_among_a_thousand(
    loaded: Callable[[str], LoadedModel], open_store: Callable[..., RowStore]
) -> None:
    """A needle by construction: in one head of one layer its key points where the signal's queries point."""
    model, store = loaded("llama"), open_store(loaded("llama"))
    shape = model.shape
    rows = 0.1 * torch.randn(store.layout.rows_shape(1000), generator=torch.Generator().manual_seed(4))
    queries = torch.randn(shape.n_layers, shape.n_heads, 6, shape.head_dim, generator=torch.Generator().manual_seed(5))
    rows[1, 0, 1, 437] = 5 * queries[1, 3, 2]
    store.append("s", rows)
    recent = [list(range(990, 1000))] * 2
    cache, session = seat(shape, rows, [recent, recent], repair_rows=23)
    missing = missing_rows(cache, 0, 1000)
    scores = score_rows(Observed(tuple(queries), torch.arange(1000, 1006)), store, "s", missing)
    assert int(scores.argmax()) == 437
    assert choose(scores, missing, session, WorkerSettings()).tolist() == list(range(435, 458))


# Through the scheduler


def test_restoring_everything_equals_the_full_cache(make_worker: Callable[..., Any], words: Callable[..., str]) -> None:
    """All rows are prefilled in one block, most are evicted, a repair with room for all brings them back."""
    worker = make_worker(block_tokens=512, recent=8)
    worker.open("full")
    worker.open("s", method="random", budget=600, repair_rows=560)
    heard = [{"role": "user", "content": words(150)}, {"role": "assistant", "content": words(40, seed=1)}]
    worker.turn("full", heard, generate=False)
    said = worker.turn("s", heard, generate=False).token_ids
    assert max(worker.memory("s").active_rows) == 40
    repaired = worker.repair("s", text="anything")
    assert set(repaired.memory.active_rows) == {len(said)}
    assert repaired.memory.evicted_rows == 0
    rows = worker.engine.store.gather("s", torch.arange(len(said)))
    for layer in range(2):
        keys, values, positions = worker.engine.cache.rows_of(worker.engine.session("s").slot, layer)
        assert torch.equal(torch.stack([keys, values]), rows[layer])
        assert positions.tolist() == [list(range(len(said)))] * 2
    # In exactly one block, so that the turn ends before anything is evicted again.
    asked = [{"role": "user", "content": "which"}, {"role": "assistant", "content": words(30, seed=2)}]
    kept = {}
    for name in ("full", "s"):
        worker.turn(name, asked, generate=False, keep_distribution=True)
        kept[name] = worker.engine.session(name).distribution.log_probs
    assert torch.allclose(kept["s"], kept["full"], atol=1e-4)


def test_after_restoring_everything_the_answer_is_transformers_own(
    make_worker: Callable[..., Any],
    words: Callable[..., str],
    continuation: Callable[..., list[int]],
    answer: Callable[..., list[int]],
) -> None:
    worker = make_worker("qwen3", block_tokens=512, recent=8)
    worker.open(method="snapkv", budget=600, repair_rows=560)
    said = list(worker.turn("s", words(150), generate=False).token_ids)
    assert max(worker.memory().active_rows) == 40
    done = worker.turn("s", words(10, seed=1), repair=True)
    assert len(done.repair.promoted) > len(said) - 3 * 40, "all but what every layer and head holds"
    assert answer(done) == continuation("qwen3", [*said, *done.token_ids[: done.prompt_tokens]], 24)
    assert max(done.memory.active_rows) == 40, "what was promoted must earn its place after the turn"


def test_a_second_repair_replaces_the_first(make_worker: Callable[..., Any], words: Callable[..., str]) -> None:
    worker, other = make_worker(block_tokens=64, recent=8), make_worker(block_tokens=64, recent=8)
    for each in (worker, other):
        each.open(method="snapkv", budget=60, repair_rows=20)
        each.turn("s", words(200), max_tokens=4)
    base = worker.memory()
    first = worker.repair("s", text=words(6, seed=1))
    assert first.memory.promoted_rows == len(first.report.promoted) == 20
    second = worker.repair("s", messages=[{"role": "user", "content": words(9, seed=2)}])
    assert second.memory.promoted_rows == len(second.report.promoted) == 20
    assert all(now <= before + 20 for now, before in zip(second.memory.active_rows, base.active_rows, strict=True))
    session = worker.engine.session("s")
    withdraw(worker.engine.cache, session)
    held = Selection.of_slot(worker.engine.cache, session.slot)
    assert held.to_bytes() == Selection.of_slot(other.engine.cache, other.engine.session("s").slot).to_bytes()
    assert second.report.scored_rows == second.memory.length
    worker.check()


def test_a_repair_leaves_nothing_of_its_signal(make_worker: Callable[..., Any], words: Callable[..., str]) -> None:
    worker = make_worker(block_tokens=64, recent=8)
    worker.open(method="snapkv", budget=60, repair_rows=20)
    worker.turn("s", words(200), max_tokens=4)
    length = worker.memory().length
    repaired = worker.repair("s", text=words(300, seed=1))
    assert repaired.report.signal_tokens > 64, "longer than a block: its last block is observed"
    assert repaired.memory.length == repaired.state.length == length == worker.engine.store.length("s")
    _, _, held = worker.engine.cache.rows_of(worker.engine.session("s").slot, 0)
    assert int(held[held != EMPTY].max()) < length


def test_without_a_reserve_a_repair_does_nothing(make_worker: Callable[..., Any], words: Callable[..., str]) -> None:
    worker = make_worker()
    for name, spec in {"full": {}, "none": {"method": "snapkv", "budget": 60}}.items():
        worker.open(name, **spec)
        worker.turn(name, words(100), max_tokens=4)
        before = worker.memory(name)
        repaired = worker.repair(name, text="a signal")
        assert not repaired.report.promoted
        assert repaired.memory == before
