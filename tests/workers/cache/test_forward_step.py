"""A forward step: rows that are read as views or gathered, and recorded queries."""

from collections.abc import Callable
from typing import Any

import torch

from workers.cache.active_cache import ActiveCache
from workers.cache.forward_step import ForwardStep


def test_a_neighbouring_heads_nan_is_not_read(
    make_cache: Callable[..., ActiveCache],
    fill: Callable[..., None],
    keep_uneven: Callable[..., None],
) -> None:
    """Rows behind a shorter head's end are multiplied by 0 in attention."""
    cache = make_cache(rows=(16, 16))
    slot = cache.claim([16, 16])
    fill(cache, slot, 16)
    keep_uneven(cache, slot, 0, few=2)
    keep_uneven(cache, slot, 1, few=2)
    step = ForwardStep(cache, [slot], 16 + torch.arange(3)[None])
    new = torch.ones(1, 2, 3, 4)
    new[0, 1] = float("nan")
    keys, values = step.update(new, new, 0)
    assert not bool(keys[0, 0].isnan().any())
    assert not bool(values[0, 0].isnan().any())


def test_adjacent_slots_are_read_without_a_copy(
    make_cache: Callable[..., ActiveCache],
    fill: Callable[..., None],
    keep_uneven: Callable[..., None],
) -> None:
    """With any bounds, if these and the heads' lengths fit into the slot's default division."""
    cache = make_cache(slots=3)
    slots = [cache.claim(bound) for bound in ([16, 12], [9, 9], [12, 12])]
    for slot in slots:
        fill(cache, slot, 5)
    keep_uneven(cache, 1, 0, few=2)

    def shares_memory(order: list[int], layer: int) -> bool:
        step = ForwardStep(cache, order, torch.full((len(order), 1), 50))
        rows = torch.ones(len(order), 2, 1, 4)
        for index in range(2):
            seen = step.update(rows, rows, index)
            if index == layer:
                lies_in_pool = [tensor.untyped_storage().data_ptr() for tensor in seen] == [
                    cache.pool.memories[0].keys.untyped_storage().data_ptr(),
                    cache.pool.memories[0].values.untyped_storage().data_ptr(),
                ]
        for slot in order:
            cache.drop_last(slot, 1)
        return lies_in_pool

    for layer in range(2):
        assert shares_memory([0, 1, 2], layer)
        assert shares_memory([1], layer)
        assert not shares_memory([2, 0], layer)
    cache.release(1)
    cache.claim([8, 18])
    assert shares_memory([0], 1)
    assert not shares_memory([0, 1], 1), "another split: other indices"


def test_a_step_records_only_the_last_queries(make_cache: Callable[..., ActiveCache]) -> None:
    cache = make_cache()
    slot = cache.claim([16, 12])
    step = ForwardStep(cache, [slot], torch.arange(6)[None], observe=2)
    queries: Any = torch.arange(4 * 6 * 4.0).view(1, 4, 6, 4)
    step.record(queries)
    assert torch.equal(step.observed[0], queries[:, :, -2:])
    unobserved = ForwardStep(cache, [slot], torch.arange(6)[None])
    unobserved.record(queries)
    assert unobserved.observed == []
