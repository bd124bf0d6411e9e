"""Prefetched pages are read from memory."""

from collections.abc import Callable

import torch
from torch import Tensor

from kvstore.format.page import PageKey, PageLayout
from kvstore.store import RowStore

OpenStore = Callable[..., RowStore]
MakeRows = Callable[..., Tensor]
Until = Callable[..., None]


def test_prefetched_pages_are_read_from_memory(
    open_store: OpenStore, make_rows: MakeRows, layout: PageLayout, until: Until
) -> None:
    store = open_store(ram_pages=8)
    rows = make_rows(80)
    store.append("a", rows)
    store.append("b", rows)
    assert store.flush("a")
    assert store.flush("b")
    for _ in range(2):
        store.prefetch("a")
    store.prefetch("unknown")
    hot = [PageKey("a", index) for index in range(6, 10)]
    until(
        lambda: all(store._stack.tiers.all[0].contains(hot)),
        "half of the memory holds the last pages",
    )
    before = store.tiers()["nvme"].counters.hits
    assert torch.equal(store.gather("a", torch.arange(48, 80)), rows[:, :, :, 48:])
    assert store.tiers()["nvme"].counters.hits == before
