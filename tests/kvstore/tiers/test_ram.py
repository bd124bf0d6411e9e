"""The RAM tier keeps to its limit, and drops only what a lower tier holds."""

import resource
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import TierFullError, TierSettingsError
from kvstore.format.codec import decode_page
from kvstore.format.page import PageKey, PageLayout, parse_header
from kvstore.tiers.arena import Arena, Buffer
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


def test_a_page_that_reached_a_lower_tier_may_leave(
    layout: PageLayout, make_page: MakePage
) -> None:
    tier = RamTier(layout.page_bytes)
    tier.put([make_page(0)])
    tier.put([make_page(0)], backed=True)
    tier.put([make_page(1)], backed=True)
    assert held(tier) == [1]


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
    assert held(tier) == [0]


def test_a_page_that_is_read_stays_whole_after_it_was_dropped(
    layout: PageLayout, make_page: MakePage
) -> None:
    tier = RamTier(2 * layout.page_bytes)
    tier.put([make_page(0), make_page(1)])
    (read,) = tier.get([PageKey("s", 0)])
    assert read is not None
    rows = decode_page(layout, parse_header(read), read)
    wanted = rows.clone()
    del read
    for sequence in range(2, 9):
        tier.delete([PageKey("s", 0)])
        tier.put([make_page(0, sequence)])
    assert torch.equal(rows, wanted)
    tier.check()


def test_get_hands_out_the_page_itself(layout: PageLayout, make_page: MakePage) -> None:
    tier = RamTier(2 * layout.page_bytes)
    tier.put([make_page(0)])
    addresses = []
    for _ in range(2):
        (read,) = tier.get([PageKey("s", 0)])
        assert read is not None
        addresses.append(decode_page(layout, parse_header(read), read).data_ptr())
    assert addresses[0] == addresses[1]


def test_memory_is_touched_when_a_page_comes_to_it() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tiers = [RamTier(1 << 30) for _ in range(4)]
    assert (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 18
    )  # in units of 1,024 bytes
    assert all(tier.used_bytes == 0 for tier in tiers)


def test_memory_that_there_is_not_is_refused_at_the_start() -> None:
    with pytest.raises(TierSettingsError, match="cannot allocate .* bytes of memory for pages"):
        RamTier(1 << 60)


# The arena


def test_a_part_comes_back_when_the_last_that_refers_to_it_is_gone() -> None:
    arena = Arena(256)
    part = arena.allocate(200)
    assert part is not None
    kept = [torch.frombuffer(part.data[64:128], dtype=torch.uint8)[3:], part.data[7:9]]
    del part
    while kept:
        assert (arena.allocate(1), arena.free_bytes) == (None, 0)
        del kept[-1]
    assert arena.free_bytes == 256
    assert arena.allocate(256) is not None


def test_free_stretches_beside_each_other_are_one() -> None:
    arena = Arena(4 * 64)
    parts = {place: arena.allocate(64) for place in range(4)}
    for place in (0, 2, 1):
        assert arena.allocate(128) is None
        del parts[place]
    assert arena.allocate(193) is None
    assert arena.allocate(192) is not None


@given(steps=st.lists(st.tuples(st.integers(1, 300), st.integers(0, 7)), max_size=60))
def test_parts_never_overlap(steps: list[tuple[int, int]]) -> None:
    arena = Arena(1024)
    parts: dict[int, tuple[int, Buffer]] = {}
    part: Buffer | None = None
    for number, (size, place) in enumerate(steps):
        parts.pop(place, None)
        if (part := arena.allocate(size)) is not None:
            part[:] = number % 256
            parts[place] = number % 256, part
        assert all(bool((held == value).all()) for value, held in parts.values())
    parts.clear()
    del part
    assert arena.free_bytes == 1024
