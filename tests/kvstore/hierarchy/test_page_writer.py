"""Queued pages stay readable, and refused pages and deletions are retried."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvstore.errors import TierFullError
from kvstore.format.page import PageLayout
from kvstore.store import RowStore
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.tiers.ram import RamTier
from tests.kvstore.failing_files import FaultyTier
from tests.kvstore.stored_rows import append, read_all, write

OpenStore = Callable[..., RowStore]
MakeRows = Callable[..., Tensor]


def test_rows_are_readable_while_their_pages_are_queued(
    layout: PageLayout,
    make_rows: MakeRows,
    blocked_tier: Any,
) -> None:
    store = RowStore(layout, [RamTier(1 << 20), blocked_tier])
    rows = make_rows(45)
    append(store, "a", rows)
    assert torch.equal(read_all(store, "a"), rows)
    assert store.usage() == {"ram": 0, "blocked": 0}
    store.truncate("a", 16)
    append(store, "a", rows[:, :, :, :13])
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
    append(store, "old", make_rows(16, seed=1))
    assert store.flush("old")
    append(store, "a", rows[:, :, :, :40])
    assert not store.flush("a")
    append(store, "a", rows[:, :, :, 40:])
    assert not store.flush("a")
    assert torch.equal(read_all(store, "a"), rows)
    with pytest.raises(TierFullError):
        append(store, "a", rows)
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
    append(store, "a", rows)
    assert not store.flush("a")
    assert torch.equal(read_all(store, "a"), rows)
    blocked_tier.failing = False
    assert store.flush("a")
    store.check()
    assert torch.equal(read_all(store, "a"), rows)
    store.close()


def test_a_page_is_not_written_again_while_it_is_queued(
    layout: PageLayout, make_rows: MakeRows, blocked_tier: Any
) -> None:
    store = RowStore(layout, [blocked_tier])
    rows = make_rows(16)
    for session in "abc":
        append(store, session, rows)
    blocked_tier.release.set()
    assert all(store.flush(session) for session in "abc")
    assert store.tiers()["blocked"].counters.writes == 2
    store.close()


def test_a_refused_deletion_does_not_stop_those_that_append(
    layout: PageLayout, make_rows: MakeRows, tmp_path: Path
) -> None:
    upper = FaultyTier(tmp_path / "upper", name="upper")
    lower = NvmeTier(tmp_path / "lower", name="lower")
    store = RowStore(layout, [upper, lower], backlog_pages=1)
    ids = write(store, "a", make_rows(24))
    store.close_session("a")
    upper.fails = "writes"
    store.delete(ids).result()
    for seed in range(10):
        append(store, "b", make_rows(16, seed=seed + 1))
    assert store.flush("b")
    upper.fails = ""
    store.close()


def test_ram_alone_never_drops_a_row(layout: PageLayout, make_rows: MakeRows) -> None:
    store = RowStore(layout, [RamTier(3 * layout.page_bytes)], backlog_pages=2)
    rows = make_rows(60)
    append(store, "a", rows[:, :, :, :24])
    assert not store.flush("a"), "memory is not durable"
    append(store, "a", rows[:, :, :, 24:40])
    assert not store.flush("a")
    with pytest.raises(TierFullError):
        append(store, "a", rows[:, :, :, 40:])
    assert torch.equal(read_all(store, "a"), rows[:, :, :, :40])
    store.truncate("a", 24)
    store.close()
