"""A tier that hangs costs one timeout, then nothing until it answers."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import CorruptPageError, StoreClosedError, TierFailedError
from kvstore.format.page import PageId
from kvstore.tiers.bounded import BoundedTier
from kvstore.tiers.nvme.tier import NvmeTier

MakePage = Callable[..., tuple[PageId, bytes]]
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


def test_a_late_write_never_overtakes_a_later_deletion(
    bounded: BoundedTier, blocked_tier: Any, make_page: MakePage, until: Until
) -> None:
    page = make_page(0)
    with pytest.raises(TierFailedError):
        bounded.put([page])
    blocked_tier.release.set()
    until(lambda: not bounded._hung)
    bounded.delete([page[0]])
    assert bounded.get([page[0]]) == [None]
    bounded.put([page])
    assert bounded.get([page[0]]) == [page[1]]


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
