"""Promoted rows are bitwise those that were evicted.

Rows are demoted only for others of higher utility.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvstore.store import RowStore
from tests.kvstore.page_ids import make_ids
from workers import methods
from workers.cache.active_cache import EMPTY, ActiveCache, KVShape
from workers.engine.selection import Selection
from workers.engine.session import ResidentSession, SessionConfig, WorkerSession
from workers.model.loader import LoadedModel
from workers.repair.promotion import (
    RowSwap,
    apply_swap,
    demote_promoted,
    expand_to_heads,
    missing_rows,
    pair_rows,
    unique_tokens,
)


@pytest.fixture
def stored(
    loaded: Callable[[str], LoadedModel], open_store: Callable[..., RowStore]
) -> Callable[..., tuple[RowStore, Tensor]]:
    """stored(tokens).

    A store with random rows of session "s", and these rows `[L, 2, n_kv_heads, tokens, d]`.
    """

    def make(tokens: int) -> tuple[RowStore, Tensor]:
        store = open_store(loaded("llama"))
        rows = torch.randn(
            store.layout.rows_shape(tokens), generator=torch.Generator().manual_seed(1)
        )
        store.append("s", rows, make_ids(range(tokens // store.layout.page_tokens)))
        return store, rows

    return make


def make_resident(
    shape: KVShape, rows: Tensor, held: list[list[list[int]]]
) -> tuple[ActiveCache, ResidentSession]:
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
    layer_rows = (length,) * shape.n_layers
    config = SessionConfig("s", 1, length, 8, methods.build("snapkv"), layer_rows)
    session = WorkerSession.create(config)
    session.length = length
    session.slot = slot
    return cache, ResidentSession(session)


UNEVEN = [[[0, 1, 5, 9, 30], [2, 3]], [[4, 7, 8], [0, 9, 10, 29]]]


def test_missing_rows_are_those_that_are_not_active_in_a_head(
    stored: Callable[..., tuple[RowStore, Tensor]], loaded: Callable[[str], LoadedModel]
) -> None:
    _, rows = stored(31)
    cache, _ = make_resident(loaded("llama").shape, rows, UNEVEN)
    missing = missing_rows(cache, 0, 31)
    for layer, heads in enumerate(UNEVEN):
        for head, kept in enumerate(heads):
            assert missing[layer, head].nonzero().flatten().tolist() == sorted(
                set(range(31)) - set(kept)
            )


def promote(cache: ActiveCache, store: RowStore, resident: ResidentSession, tokens: Tensor) -> None:
    """Promote tokens in every layer and head in which they are evicted."""
    length = resident.session.length
    swap = RowSwap(expand_to_heads(tokens, missing_rows(cache, 0, length)))
    apply_swap(cache, store, resident, swap, torch.zeros(length))


def test_promoted_rows_are_bitwise_equal_where_they_were_missing(
    stored: Callable[..., tuple[RowStore, Tensor]], loaded: Callable[[str], LoadedModel]
) -> None:
    store, rows = stored(31)
    cache, resident = make_resident(loaded("llama").shape, rows, UNEVEN)
    chosen = torch.tensor([0, 3, 9, 20])
    promote(cache, store, resident, chosen)
    cache.check_integrity()
    assert resident.session.promoted_rows == 4
    for layer, heads in enumerate(UNEVEN):
        keys, values, positions = cache.get_rows(0, layer)
        for head, kept in enumerate(heads):
            now = sorted({*kept, *chosen.tolist()})
            assert positions[head, : len(now)].tolist() == now
            assert torch.equal(keys[head, : len(now)], rows[layer, 0, head, now])
            assert torch.equal(values[head, : len(now)], rows[layer, 1, head, now])
            flags = cache.read(0, layer).promoted[head, : len(now)].tolist()
            assert flags == [position not in kept for position in now]


def test_demoting_promoted_rows_restores_the_selection_before(
    stored: Callable[..., tuple[RowStore, Tensor]], loaded: Callable[[str], LoadedModel]
) -> None:
    store, rows = stored(31)
    cache, resident = make_resident(loaded("llama").shape, rows, UNEVEN)
    before = Selection.from_slot(cache, 0)
    promote(cache, store, resident, torch.tensor([0, 3, 9, 20]))
    demote_promoted(cache, resident)
    cache.check_integrity()
    assert Selection.from_slot(cache, 0).to_bytes() == before.to_bytes()
    for layer, heads in enumerate(UNEVEN):
        for head, kept in enumerate(heads):
            assert torch.equal(
                cache.get_rows(0, layer)[0][head, : len(kept)], rows[layer, 0, head, kept]
            )
    assert resident.session.promoted_rows == 0


def test_promoting_nothing_changes_nothing(
    stored: Callable[..., tuple[RowStore, Tensor]], loaded: Callable[[str], LoadedModel]
) -> None:
    store, rows = stored(31)
    cache, resident = make_resident(loaded("llama").shape, rows, UNEVEN)
    before = Selection.from_slot(cache, 0)
    promote(cache, store, resident, torch.empty(0, dtype=torch.int64))
    assert Selection.from_slot(cache, 0).to_bytes() == before.to_bytes()


# Swaps


def test_the_best_wanted_row_replaces_the_worst_active_row_while_its_utility_is_higher(
    stored: Callable[..., tuple[RowStore, Tensor]], loaded: Callable[[str], LoadedModel]
) -> None:
    store, rows = stored(31)
    everywhere = [[0, 5, 6, 7, 30]] * 2
    cache, resident = make_resident(loaded("llama").shape, rows, [everywhere, everywhere])
    utility = torch.zeros(31)
    utility[[5, 6, 7, 10, 11, 12]] = torch.tensor([0.5, 0.1, 0.3, 0.9, 0.2, 0.05])
    wanted = expand_to_heads(torch.tensor([10, 11, 12]), missing_rows(cache, 0, 31))
    swap = pair_rows(cache, resident, wanted, utility, sinks=1, recent=1)
    for layer in range(2):
        # 10 for 6; 11 is utility less than 7, and 12 than 5.
        assert unique_tokens(swap.promoted[layer : layer + 1]).tolist() == [10]
        assert unique_tokens(swap.demoted[layer : layer + 1]).tolist() == [6]
    assert swap.demoted_rows() == 1, "one of each head"
    apply_swap(cache, store, resident, swap, utility)
    cache.check_integrity()
    assert resident.session.promoted_rows == 1
    assert cache.get_rows(0, 0)[2].tolist() == [[0, 5, 7, 10, 30]] * 2
    assert resident.session.eviction_scores.tokens.tolist() == [6]
    assert resident.session.eviction_scores.scores.tolist() == pytest.approx([0.1])


def test_sinks_and_the_recent_window_are_never_demoted(
    stored: Callable[..., tuple[RowStore, Tensor]], loaded: Callable[[str], LoadedModel]
) -> None:
    _, rows = stored(31)
    everywhere = [[0, 1, 29, 30]] * 2
    cache, resident = make_resident(loaded("llama").shape, rows, [everywhere, everywhere])
    utility = torch.zeros(31)
    utility[10:14] = 1.0
    swap = pair_rows(
        cache,
        resident,
        expand_to_heads(torch.arange(10, 14), missing_rows(cache, 0, 31)),
        utility,
        2,
        2,
    )
    assert not len(unique_tokens(swap.promoted))
    assert not len(unique_tokens(swap.demoted))


@pytest.mark.parametrize("seed", range(5))
def test_a_swap_keeps_every_heads_length(
    seed: int, stored: Callable[..., tuple[RowStore, Tensor]], loaded: Callable[[str], LoadedModel]
) -> None:
    store, rows = stored(31)
    cache, resident = make_resident(loaded("llama").shape, rows, UNEVEN)
    utility = torch.rand(31, generator=torch.Generator().manual_seed(seed))
    before = cache.lengths.clone()
    missing = missing_rows(cache, 0, 31)
    best = torch.where(missing, utility, -1.0).topk(3)
    wanted = list(torch.where(best.values < 0, -1, best.indices))
    apply_swap(
        cache,
        store,
        resident,
        pair_rows(cache, resident, wanted, utility, sinks=1, recent=2),
        utility,
    )
    cache.check_integrity()
    assert torch.equal(cache.lengths, before)
    for layer in range(2):
        keys, values, positions = cache.get_rows(0, layer)
        for head in range(2):
            held = positions[head][positions[head] != EMPTY].long()
            assert torch.equal(keys[head, : len(held)], rows[layer, 0, head, held])
            assert torch.equal(values[head, : len(held)], rows[layer, 1, head, held])


def test_promoted_rows_count_as_missing_when_asked(
    stored: Callable[..., tuple[RowStore, Tensor]], loaded: Callable[[str], LoadedModel]
) -> None:
    store, rows = stored(31)
    cache, resident = make_resident(loaded("llama").shape, rows, UNEVEN)
    before = missing_rows(cache, 0, 31)
    promote(cache, store, resident, torch.tensor([3, 20]))
    assert not missing_rows(cache, 0, 31)[:, :, [3, 20]].any()
    assert torch.equal(missing_rows(cache, 0, 31, promoted=True), before)
