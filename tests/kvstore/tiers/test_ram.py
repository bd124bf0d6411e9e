"""The RAM tier keeps to its limit, and drops only what a lower tier holds."""

from collections.abc import Callable

import pytest

from kvstore.errors import TierFullError
from kvstore.page import PageKey, PageLayout
from kvstore.tiers.ram import RamTier

MakePage = Callable[..., tuple[PageKey, bytes]]


def held(tier: RamTier) -> list[int]:
    return sorted(header.key.index for header in tier.stored())


def test_the_coldest_backed_page_leaves_first(layout: PageLayout, make_page: MakePage) -> None:
    tier = RamTier(3 * layout.page_bytes)
    tier.put([make_page(index) for index in range(3)], backed=True)
    tier.get([PageKey("s", 0)])
    tier.put([make_page(3)], backed=True)
    assert held(tier) == [0, 2, 3]
    tier.check()


def test_a_page_that_is_nowhere_else_never_leaves(layout: PageLayout, make_page: MakePage) -> None:
    tier = RamTier(2 * layout.page_bytes)
    tier.put([make_page(0)])
    tier.put([make_page(1)], backed=True)
    tier.put([make_page(2)], backed=True)
    assert held(tier) == [0, 2]
    tier.put([make_page(3)])
    with pytest.raises(TierFullError):
        tier.put([make_page(4)], backed=True)
    assert held(tier) == [0, 3]
    tier.check()


def test_a_page_that_reached_a_lower_tier_may_leave(layout: PageLayout, make_page: MakePage) -> None:
    tier = RamTier(layout.page_bytes)
    tier.put([make_page(0)])
    tier.put([make_page(0)], backed=True)
    tier.put([make_page(1)], backed=True)
    assert held(tier) == [1]


def test_a_longer_version_replaces_its_page_within_the_limit(layout: PageLayout, make_page: MakePage) -> None:
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
    assert held(tier) == [0]
