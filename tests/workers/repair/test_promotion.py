"""Rows come back exactly as they were, and leave for others only where that pays."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kvstore.store import RowStore
from workers import methods
from workers.cache.active_cache import EMPTY, ActiveCache, KVShape
from workers.engine.session import Selection, WorkerSession
from workers.model.loader import LoadedModel
from workers.primitives.observation import RecentQueries
from workers.repair.promotion import (
    RowSwap,
    best_of_heads,
    exchange,
    missing_rows,
    move,
    tokens_of,
    whole,
    withdraw,
)


@pytest.fixture
def stored(
    loaded: Callable[[str], LoadedModel], open_store: Callable[..., RowStore]
) -> Callable[..., tuple[RowStore, Tensor]]:
    """stored(tokens): a store with random rows of session "s", and these rows `[L, 2, n_kv_heads, tokens, d]`."""

    def make(tokens: int) -> tuple[RowStore, Tensor]:
        store = open_store(loaded("llama"))
        rows = torch.randn(
            store.layout.rows_shape(tokens), generator=torch.Generator().manual_seed(1)
        )
        store.append("s", rows)
        return store, rows

    return make


def seat(
    shape: KVShape, rows: Tensor, held: list[list[list[int]]], **session: Any
) -> tuple[ActiveCache, Any]:
    """A cache whose one slot holds the rows at `held[layer][head]`, and its session."""
    length = rows.shape[3]
    cache = ActiveCache(shape, 1, [length] * shape.n_layers)
    slot = cache.claim([length] * shape.n_layers)
    for layer, heads in enumerate(held):
        width = max(map(len, heads))
        positions = torch.tensor(
            [head + [EMPTY] * (width - len(head)) for head in heads], dtype=torch.int32
        )
        keys, values = torch.zeros(2, shape.n_kv_heads, width, shape.head_dim)
        for head, kept in enumerate(heads):
            keys[head, : len(kept)] = rows[layer, 0, head, kept]
            values[head, : len(kept)] = rows[layer, 1, head, kept]
        cache.insert(
            slot, layer, positions, keys, values, torch.zeros_like(positions, dtype=torch.bool)
        )
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
            assert missing[layer, head].nonzero().flatten().tolist() == sorted(
                set(range(31)) - set(kept)
            )


def promote(cache: ActiveCache, store: RowStore, session: WorkerSession, tokens: Tensor) -> None:
    """Bring tokens back in every layer and head that misses them."""
    missing = missing_rows(cache, 0, session.length)
    move(cache, store, session, RowSwap(whole(tokens, missing)), torch.zeros(session.length))


def test_promoted_rows_come_back_bit_by_bit_where_they_are_missing(
    stored: Callable[..., tuple[RowStore, Tensor]], loaded: Callable[[str], LoadedModel]
) -> None:
    store, rows = stored(31)
    cache, session = seat(loaded("llama").shape, rows, UNEVEN)
    chosen = torch.tensor([0, 3, 9, 20])
    promote(cache, store, session, chosen)
    cache.check_integrity()
    assert session.promoted_rows == 4
    for layer, heads in enumerate(UNEVEN):
        keys, values, positions = cache.get_rows(0, layer)
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
    promote(cache, store, session, torch.tensor([0, 3, 9, 20]))
    withdraw(cache, session)
    cache.check_integrity()
    assert Selection.of_slot(cache, 0).to_bytes() == before.to_bytes()
    for layer, heads in enumerate(UNEVEN):
        for head, kept in enumerate(heads):
            assert torch.equal(
                cache.get_rows(0, layer)[0][head, : len(kept)], rows[layer, 0, head, kept]
            )
    assert session.promoted_rows == 0


def test_promoting_nothing_is_harmless(
    stored: Callable[..., tuple[RowStore, Tensor]], loaded: Callable[[str], LoadedModel]
) -> None:
    store, rows = stored(31)
    cache, session = seat(loaded("llama").shape, rows, UNEVEN)
    before = Selection.of_slot(cache, 0)
    promote(cache, store, session, torch.empty(0, dtype=torch.int64))
    assert Selection.of_slot(cache, 0).to_bytes() == before.to_bytes()


# RowSwap


def test_the_most_wanted_takes_the_place_of_the_least_wanted_as_long_as_it_is_worth_more(
    stored: Callable[..., tuple[RowStore, Tensor]], loaded: Callable[[str], LoadedModel]
) -> None:
    store, rows = stored(31)
    everywhere = [[0, 5, 6, 7, 30]] * 2
    cache, session = seat(loaded("llama").shape, rows, [everywhere, everywhere])
    worth = torch.zeros(31)
    worth[[5, 6, 7, 10, 11, 12]] = torch.tensor([0.5, 0.1, 0.3, 0.9, 0.2, 0.05])
    wanted = whole(torch.tensor([10, 11, 12]), missing_rows(cache, 0, 31))
    change = exchange(cache, session, wanted, worth, sinks=1, recent=1)
    for layer in range(2):
        # 10 for 6; 11 is worth less than 7, and 12 than 5.
        assert tokens_of(change.promoted[layer : layer + 1]).tolist() == [10]
        assert tokens_of(change.demoted[layer : layer + 1]).tolist() == [6]
    assert change.demoted_rows() == 1, "one of each head"
    move(cache, store, session, change, worth)
    cache.check_integrity()
    assert session.promoted_rows == 1
    assert cache.get_rows(0, 0)[2].tolist() == [[0, 5, 7, 10, 30]] * 2
    assert float(session.scores_of_evicted()[6]) == pytest.approx(0.1)


def test_sinks_and_the_recent_window_never_leave(
    stored: Callable[..., tuple[RowStore, Tensor]], loaded: Callable[[str], LoadedModel]
) -> None:
    _, rows = stored(31)
    everywhere = [[0, 1, 29, 30]] * 2
    cache, session = seat(loaded("llama").shape, rows, [everywhere, everywhere])
    worth = torch.zeros(31)
    worth[10:14] = 1.0
    change = exchange(
        cache, session, whole(torch.arange(10, 14), missing_rows(cache, 0, 31)), worth, 2, 2
    )
    assert not len(tokens_of(change.promoted))
    assert not len(tokens_of(change.demoted))


@pytest.mark.parametrize("seed", range(5))
def test_an_exchange_leaves_every_head_as_long_as_it_was(
    seed: int, stored: Callable[..., tuple[RowStore, Tensor]], loaded: Callable[[str], LoadedModel]
) -> None:
    store, rows = stored(31)
    cache, session = seat(loaded("llama").shape, rows, UNEVEN)
    worth = torch.rand(2, 2, 31, generator=torch.Generator().manual_seed(seed))
    before = cache.lengths.clone()
    wanted = best_of_heads(worth, missing_rows(cache, 0, 31), 3)
    move(cache, store, session, exchange(cache, session, wanted, worth, sinks=1, recent=2), worth)
    cache.check_integrity()
    assert torch.equal(cache.lengths, before)
    for layer in range(2):
        keys, values, positions = cache.get_rows(0, layer)
        for head in range(2):
            held = positions[head][positions[head] != EMPTY].long()
            assert torch.equal(keys[head, : len(held)], rows[layer, 0, head, held])
            assert torch.equal(values[head, : len(held)], rows[layer, 1, head, held])


def test_each_head_may_want_rows_of_its_own(
    stored: Callable[..., tuple[RowStore, Tensor]], loaded: Callable[[str], LoadedModel]
) -> None:
    _, rows = stored(31)
    cache, _ = seat(loaded("llama").shape, rows, UNEVEN)
    missing = missing_rows(cache, 0, 31)
    worth = torch.rand(2, 2, 31, generator=torch.Generator().manual_seed(3))
    for layer, wanted in enumerate(best_of_heads(worth, missing, 4)):
        for head in range(2):
            best = sorted(
                missing[layer, head].nonzero().flatten().tolist(),
                key=lambda i: -worth[layer, head, i],
            )[:4]
            assert wanted[head].tolist() == sorted(best)


def test_what_a_repair_brought_counts_as_missing_when_asked(
    stored: Callable[..., tuple[RowStore, Tensor]], loaded: Callable[[str], LoadedModel]
) -> None:
    store, rows = stored(31)
    cache, session = seat(loaded("llama").shape, rows, UNEVEN)
    before = missing_rows(cache, 0, 31)
    promote(cache, store, session, torch.tensor([3, 20]))
    assert not missing_rows(cache, 0, 31)[:, :, [3, 20]].any()
    assert torch.equal(missing_rows(cache, 0, 31, promoted=True), before)
