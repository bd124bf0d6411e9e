"""Queued pages stay readable, and refused pages and deletions are retried."""

from collections.abc import Callable
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
from torch import Tensor

from kvstore.errors import TierFullError
from kvstore.format.page import PageLayout
from kvstore.store import RowStore
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.tiers.ram import RamTier

OpenStore = Callable[..., RowStore]
MakeRows = Callable[..., Tensor]


def read_all(store: RowStore, session: str) -> Tensor:
    return store.gather(session, torch.arange(store.length(session)))


def test_rows_are_readable_while_their_pages_are_queued(
    layout: PageLayout,
    make_rows: MakeRows,
    blocked_tier: Any,
) -> None:
    store = RowStore(layout, [RamTier(1 << 20), blocked_tier])
    rows = make_rows(45)
    store.append("a", rows)
    assert torch.equal(read_all(store, "a"), rows)
    assert store.usage() == {"ram": 0, "blocked": 0}
    store.truncate("a", 16)
    store.append("a", rows[:, :, :, :13])
    expected = torch.cat([rows[:, :, :, :16], rows[:, :, :, :13]], 3)
    assert torch.equal(read_all(store, "a"), expected)
    blocked_tier.release.set()
    store.flush("a")
    store.check()
    assert torch.equal(read_all(store, "a"), expected)
    store.close()


def test_a_full_lower_tier_is_reported_by_flush_and_loses_nothing(
    layout: PageLayout, make_rows: MakeRows, tmp_path: Path
) -> None:
    nvme = NvmeTier(tmp_path / "rows", limit_bytes=5 * layout.page_bytes)
    store = RowStore(layout, [RamTier(2 * layout.page_bytes), nvme], backlog_pages=3)
    rows = make_rows(64)
    store.append("old", rows[:, :, :, :16])
    assert store.flush("old")
    store.append("a", rows[:, :, :, :40])
    assert not store.flush("a")
    store.append("a", rows[:, :, :, 40:])
    assert not store.flush("a")
    assert torch.equal(read_all(store, "a"), rows)
    with pytest.raises(TierFullError):
        store.append("a", rows)
    assert store.length("a") == 64
    store.truncate("a", 16)
    assert store.flush("a")
    assert torch.equal(read_all(store, "a"), rows[:, :, :, :16])
    store.check()
    store.close()


def test_a_tier_that_recovers_gets_every_row(
    layout: PageLayout, make_rows: MakeRows, blocked_tier: Any
) -> None:
    store = RowStore(layout, [RamTier(1 << 20), blocked_tier])
    rows = make_rows(30)
    blocked_tier.failing = True
    blocked_tier.release.set()
    store.append("a", rows)
    assert not store.flush("a")
    assert torch.equal(read_all(store, "a"), rows)
    blocked_tier.failing = False
    assert store.flush("a")
    store.check()
    assert torch.equal(read_all(store, "a"), rows)
    store.close()


def test_a_retried_deletion_never_deletes_a_later_page(
    layout: PageLayout, make_rows: MakeRows, blocked_tier: Any
) -> None:
    store = RowStore(layout, [blocked_tier])
    rows = make_rows(16)
    blocked_tier.release.set()
    store.append("a", rows)
    store.flush("a")
    blocked_tier.failing = True
    store.delete("a")
    blocked_tier.failing = False
    store.append("a", rows[:, :, :, :8])
    while store.tiers()["blocked"].counters.written_bytes < 3 * layout.page_bytes:
        sleep(0.001)
    store.flush("a")
    assert torch.equal(read_all(store, "a"), rows[:, :, :, :8])
    store.check()
    store.close()


def test_an_older_version_left_in_a_failing_upper_tier_is_never_read(
    layout: PageLayout, make_rows: MakeRows, blocked_tier: Any
) -> None:
    store = RowStore(layout, [blocked_tier, RamTier(1 << 20)])
    rows = make_rows(8)
    later = make_rows(8, seed=1)
    blocked_tier.release.set()
    store.append("a", rows)
    store.flush("a")
    (older,) = blocked_tier.stored()
    blocked_tier.failing = True
    store.truncate("a", 0)
    store.append("a", later)
    store.flush("a")
    assert list(blocked_tier.stored()) == [older]
    assert torch.equal(read_all(store, "a"), later)
    blocked_tier.failing = False
    store.close()


def test_ram_alone_never_drops_a_row(layout: PageLayout, make_rows: MakeRows) -> None:
    store = RowStore(layout, [RamTier(3 * layout.page_bytes)], backlog_pages=2)
    rows = make_rows(60)
    store.append("a", rows[:, :, :, :24])
    assert not store.flush("a"), "memory is not durable"
    store.append("a", rows[:, :, :, 24:40])
    assert not store.flush("a")
    with pytest.raises(TierFullError):
        store.append("a", rows[:, :, :, 40:])
    assert torch.equal(read_all(store, "a"), rows[:, :, :, :40])
    store.truncate("a", 24)
    store.close()
