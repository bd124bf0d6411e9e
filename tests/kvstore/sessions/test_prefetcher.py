"""Prefetched pages are read from memory."""

from collections.abc import Callable

import torch
from torch import Tensor

from kvstore.store import RowStore
from tests.kvstore.stored_rows import write

OpenStore = Callable[..., RowStore]
MakeRows = Callable[..., Tensor]
Until = Callable[..., None]


def test_prefetched_pages_are_read_from_memory(
    open_store: OpenStore, make_rows: MakeRows, until: Until
) -> None:
    store = open_store(ram_pages=8)
    rows = make_rows(80)
    ids = write(store, "a", rows)
    write(store, "b", make_rows(80, seed=1))
    for _ in range(2):
        store.prefetch("a")
    store.prefetch("unknown")
    hot = ids[6:]
    until(
        lambda: all(store._stack.tiers.all[0].contains(hot)),
        "half of the memory holds the last pages",
    )
    before = store.tiers()["nvme"].counters.hits
    assert torch.equal(store.gather("a", torch.arange(48, 80)), rows[:, :, :, 48:])
    assert store.tiers()["nvme"].counters.hits == before
