"""A tier that hangs stops no session; the other tiers go on without it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvstore.format.page import PageLayout
from kvstore.store import RowStore
from kvstore.tiers.bounded import BoundedTier
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.tiers.ram import RamTier
from tests.kvstore.stored_rows import append

MakeRows = Callable[..., Tensor]
Until = Callable[..., None]


@pytest.fixture
def bounded(blocked_tier: Any) -> Iterator[BoundedTier]:
    """A tier whose puts hang until `blocked_tier.release` is set."""
    yield BoundedTier(blocked_tier, timeout_seconds=0.3)
    blocked_tier.release.set()


def test_hung_files_stop_no_session_while_the_lowest_tier_answers(
    bounded: BoundedTier,
    blocked_tier: Any,
    layout: PageLayout,
    make_rows: MakeRows,
    tmp_path: Path,
    until: Until,
) -> None:
    lowest = NvmeTier(tmp_path / "lowest", name="lowest", compact_in_background=False)
    store = RowStore(layout, [RamTier(1 << 20), bounded, lowest])
    rows = {f"s{number}": make_rows(29, seed=number) for number in range(8)}
    for session, part in rows.items():
        append(store, session, part)
        assert store.flush(session)
    for session, part in rows.items():
        assert torch.equal(store.gather(session, torch.arange(29)), part)
    assert "blocked" in store.failures()
    blocked_tier.release.set()
    until(lambda: not bounded._hung)
    append(store, "s0", make_rows(8))
    assert store.flush("s0")
    assert store.failures() == {}
    store.close()


def test_a_hung_lowest_tier_is_answered_with_not_durable_until_it_works(
    bounded: BoundedTier, blocked_tier: Any, layout: PageLayout, make_rows: MakeRows, until: Until
) -> None:
    store = RowStore(layout, [RamTier(1 << 20), bounded])
    append(store, "a", make_rows(29))
    assert not store.flush("a")
    assert torch.equal(store.gather("a", torch.arange(29)), make_rows(29))
    assert set(store.failures()) == {"blocked"}
    blocked_tier.release.set()
    until(lambda: store.flush("a"))
    assert store.failures() == {}
    store.close()
