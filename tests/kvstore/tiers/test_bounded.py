"""A tier that hangs costs one timeout, then nothing; the other tiers go on without it."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvstore.errors import CorruptPageError, StoreClosedError, TierFailedError
from kvstore.format.page import PageKey, PageLayout
from kvstore.store import RowStore
from kvstore.tiers.bounded import BoundedTier
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.tiers.ram import RamTier

MakePage = Callable[..., tuple[PageKey, bytes]]
MakeRows = Callable[..., Tensor]
Until = Callable[..., None]


@pytest.fixture
def bounded(blocked_tier: Any) -> Iterator[BoundedTier]:
    """A tier whose puts hang until `blocked_tier.release` is set."""
    yield BoundedTier(blocked_tier, timeout_seconds=0.3)
    blocked_tier.release.set()


def test_a_hung_call_fails_and_others_fail_at_once_until_it_ends(
    bounded: BoundedTier, blocked_tier: Any, make_page: MakePage, until: Until
) -> None:
    page = make_page(0)
    with pytest.raises(TierFailedError, match=r"did not answer within 0\.3 s"):
        bounded.put([page])
    began = time.monotonic()
    for _ in range(100):
        with pytest.raises(TierFailedError, match="has not answered yet"):
            bounded.get([page[0]])
        with pytest.raises(TierFailedError):
            bounded.put([page])
    assert time.monotonic() - began < 5
    blocked_tier.release.set()
    until(lambda: not bounded._hung)
    assert bounded.get([page[0]]) == [page[1]], "the hung write took effect"


def test_a_late_write_never_overtakes_a_later_one(
    bounded: BoundedTier, blocked_tier: Any, make_page: MakePage, until: Until
) -> None:
    old, new = make_page(0, 1), make_page(0, 2)
    with pytest.raises(TierFailedError):
        bounded.put([old])
    blocked_tier.release.set()
    until(lambda: not bounded._hung)
    bounded.put([new])
    assert bounded.get([old[0]]) == [new[1]]
    bounded.delete([old[0]])
    assert bounded.get([old[0]]) == [None]


def test_the_tiers_own_errors_are_raised(tmp_path: Path, make_page: MakePage) -> None:
    tier = BoundedTier(NvmeTier(tmp_path / "rows", compact_in_background=False))
    page = make_page(0)
    tier.put([page])
    tier.flush()
    (segment,) = (tmp_path / "rows").glob("segment-*.kv")
    with segment.open("r+b") as file:
        file.seek(300)
        file.write(b"\xff\x00\xff")
    with pytest.raises(CorruptPageError):
        tier.get([page[0]])
    tier.close()
    with pytest.raises(StoreClosedError):
        tier.get([page[0]])
    tier.close()


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
        store.append(session, part)
        assert store.flush(session)
    for session, part in rows.items():
        assert torch.equal(store.gather(session, torch.arange(29)), part)
    assert "blocked" in store.failures()
    blocked_tier.release.set()
    until(lambda: not bounded._hung)
    store.append("s0", make_rows(8))
    assert store.flush("s0")
    assert store.failures() == {}
    store.close()


def test_a_hung_lowest_tier_is_answered_with_not_durable_until_it_works(
    bounded: BoundedTier, blocked_tier: Any, layout: PageLayout, make_rows: MakeRows, until: Until
) -> None:
    store = RowStore(layout, [RamTier(1 << 20), bounded])
    store.append("a", make_rows(29))
    assert not store.flush("a")
    assert torch.equal(store.gather("a", torch.arange(29)), make_rows(29))
    assert set(store.failures()) == {"blocked"}
    blocked_tier.release.set()
    until(lambda: store.flush("a"))
    assert store.failures() == {}
    store.close()
