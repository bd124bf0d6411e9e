"""The RAM tier observes its limit and drops only pages that a lower tier holds."""

import resource
from collections.abc import Callable

import pytest
import torch

from kvstore.errors import TierFullError, TierSettingsError
from kvstore.format.codec import decode_page
from kvstore.format.page import PageKey, PageLayout, parse_header
from kvstore.tiers.ram import RamTier

MakePage = Callable[..., tuple[PageKey, bytes]]


def stored_indices(tier: RamTier) -> list[int]:
    return sorted(header.key.index for header in tier.stored())


def test_the_coldest_backed_page_is_dropped_first(layout: PageLayout, make_page: MakePage) -> None:
    tier = RamTier(3 * layout.page_bytes)
    tier.put([make_page(index) for index in range(3)], backed=True)
    tier.get([PageKey("s", 0)])
    tier.put([make_page(3)], backed=True)
    assert stored_indices(tier) == [0, 2, 3]
    tier.check()


def test_an_unbacked_page_is_never_dropped(layout: PageLayout, make_page: MakePage) -> None:
    tier = RamTier(2 * layout.page_bytes)
    tier.put([make_page(0)])
    tier.put([make_page(1)], backed=True)
    tier.put([make_page(2)], backed=True)
    assert stored_indices(tier) == [0, 2]
    tier.put([make_page(3)])
    with pytest.raises(TierFullError):
        tier.put([make_page(4)], backed=True)
    assert stored_indices(tier) == [0, 3]
    tier.check()


def test_a_page_that_became_backed_may_be_dropped(layout: PageLayout, make_page: MakePage) -> None:
    tier = RamTier(layout.page_bytes)
    tier.put([make_page(0)])
    tier.put([make_page(0)], backed=True)
    tier.put([make_page(1)], backed=True)
    assert stored_indices(tier) == [1]


def test_a_longer_version_replaces_its_page_within_the_limit(
    layout: PageLayout, make_page: MakePage
) -> None:
    tier = RamTier(2 * layout.page_bytes)
    tier.put([make_page(0, 1, tokens=3), make_page(1)])
    tier.put([make_page(0, 2)])
    assert tier.used_bytes == tier.limit_bytes
    tier.check()


def test_a_refused_put_drops_nothing(layout: PageLayout, make_page: MakePage) -> None:
    tier = RamTier(layout.page_bytes)
    tier.put([make_page(0, tokens=2)], backed=True)
    with pytest.raises(TierFullError):
        tier.put([(PageKey("s", 1), make_page(1)[1] + b"\0")])
    assert stored_indices(tier) == [0]


def test_a_page_that_is_read_stays_intact_after_it_was_dropped(
    layout: PageLayout, make_page: MakePage
) -> None:
    tier = RamTier(2 * layout.page_bytes)
    tier.put([make_page(0), make_page(1)])
    (read,) = tier.get([PageKey("s", 0)])
    assert read is not None
    rows = decode_page(layout, parse_header(read), read)
    expected = rows.clone()
    del read
    for sequence in range(2, 9):
        tier.delete([PageKey("s", 0)])
        tier.put([make_page(0, sequence)])
    assert torch.equal(rows, expected)
    tier.check()


def test_get_returns_views_without_copying(layout: PageLayout, make_page: MakePage) -> None:
    tier = RamTier(2 * layout.page_bytes)
    tier.put([make_page(0)])
    addresses = []
    for _ in range(2):
        (read,) = tier.get([PageKey("s", 0)])
        assert read is not None
        addresses.append(decode_page(layout, parse_header(read), read).data_ptr())
    assert addresses[0] == addresses[1]


def test_memory_is_touched_only_when_pages_are_put() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tiers = [RamTier(1 << 30) for _ in range(4)]
    assert (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 18
    )  # In units of 1,024 bytes.
    assert all(tier.used_bytes == 0 for tier in tiers)


def test_an_impossible_memory_limit_is_refused_at_the_start() -> None:
    with pytest.raises(TierSettingsError, match=r"cannot allocate \d+ bytes of memory for pages"):
        RamTier(1 << 60)
