"""Calls of tiers are counted and timed."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvstore.format.page import PageLayout
from kvstore.store import RowStore
from kvstore.tiers.ram import RamTier
from tests.kvstore.stored_rows import append

MakeRows = Callable[..., Tensor]


def test_tier_calls_are_counted_and_timed_with_their_errors(
    layout: PageLayout, make_rows: MakeRows, blocked_tier: Any
) -> None:
    store = RowStore(layout, [RamTier(1 << 20), blocked_tier])
    blocked_tier.release.set()
    blocked_tier.failing = True
    append(store, "a", make_rows(8))
    assert not store.flush("a")
    blocked_tier.failing = False
    assert store.flush("a")
    store.gather("a", torch.arange(8))
    ram = store.tiers()["ram"].counters
    blocked = store.tiers()["blocked"].counters
    assert blocked.errors > 0
    assert blocked.writes > blocked.errors
    assert blocked.write_seconds > 0
    assert (ram.errors, ram.hits) == (0, 1)
    assert ram.reads > 0
    assert ram.read_seconds > 0
    store.close()
