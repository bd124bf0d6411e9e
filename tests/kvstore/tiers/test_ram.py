"""The RAM tier observes its limit and drops only pages that a lower tier holds."""

import resource
from collections.abc import Callable

import psutil
import pytest
import torch

from kvstore.errors import TierFullError, TierSettingsError
from kvstore.format.codec import Codec, decode_page, encode_page
from kvstore.format.page import HEADER_BYTES, PageKey, PageLayout, parse_header
from kvstore.format.page_table import PageVersion
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


def address_of(tier: RamTier, index: int) -> int:
    """Where the rows of a resident page lie."""
    (blob,) = tier.get([PageKey("s", index)])
    assert blob is not None
    return torch.frombuffer(blob, dtype=torch.uint8).data_ptr() + HEADER_BYTES


def test_pages_have_what_readers_do_not_reserve(layout: PageLayout, make_page: MakePage) -> None:
    tier = RamTier(8 * layout.page_bytes)
    tier.put([make_page(index) for index in range(8)], backed=True)
    assert tier.reserve(5 * layout.page_bytes)
    assert stored_indices(tier) == [5, 6, 7]
    tier.put([make_page(8)], backed=True)
    assert stored_indices(tier) == [6, 7, 8]
    assert tier.reserve(0)
    tier.put([make_page(index) for index in range(5)], backed=True)
    assert stored_indices(tier) == [0, 1, 2, 3, 4, 6, 7, 8]
    tier.check()


def test_a_held_page_counts_once_and_is_not_dropped(
    layout: PageLayout, make_page: MakePage
) -> None:
    tier = RamTier(8 * layout.page_bytes)
    tier.put([make_page(index) for index in range(5)], backed=True)
    assert tier.reserve(3 * layout.page_bytes)
    places = [address_of(tier, index) for index in range(3)]
    for index, place in enumerate(places):
        tier.hold(PageVersion(PageKey("s", index), 1), place)
    tier.put([make_page(index) for index in range(5, 11)], backed=True)
    assert stored_indices(tier) == [0, 1, 2, 6, 7, 8, 9, 10]
    tier.check()
    tier.release(PageVersion(PageKey("s", 0), 1))
    assert tier.room_bytes == 6 * layout.page_bytes
    for index in range(11, 17):
        tier.put([make_page(index)], backed=True)
    assert stored_indices(tier) == [1, 2, *range(11, 17)]
    tier.check()


def test_a_page_whose_reader_has_it_elsewhere_is_as_any_other(
    layout: PageLayout, make_page: MakePage
) -> None:
    tier = RamTier(4 * layout.page_bytes)
    tier.put([make_page(0), make_page(1)], backed=True)
    assert tier.reserve(2 * layout.page_bytes)
    elsewhere = torch.empty(layout.page_bytes, dtype=torch.uint8)
    tier.hold(PageVersion(PageKey("s", 0), 1), elsewhere.data_ptr())
    tier.hold(PageVersion(PageKey("s", 9), 1), elsewhere.data_ptr())
    tier.put([make_page(2)], backed=True)
    assert stored_indices(tier) == [1, 2]
    tier.check()


def test_readers_leave_a_quarter_to_pages_that_no_lower_tier_has(
    layout: PageLayout, make_page: MakePage
) -> None:
    tier = RamTier(8 * layout.page_bytes)
    assert not tier.reserve(6 * layout.page_bytes + 1)
    assert tier.reserve(6 * layout.page_bytes)
    tier.put([make_page(0), make_page(1)])
    with pytest.raises(TierFullError, match="by open sessions"):
        tier.put([make_page(2)])
    assert tier.reserve(3 * layout.page_bytes), "less is never refused"
    tier.put([make_page(index) for index in range(2, 5)])
    assert tier.reservable_bytes == 3 * layout.page_bytes
    assert not tier.reserve(3 * layout.page_bytes + 1)
    assert stored_indices(tier) == [0, 1, 2, 3, 4]
    tier.check()


def test_a_held_page_stays_where_it_is_when_a_lower_tier_has_it_too(
    layout: PageLayout, make_page: MakePage
) -> None:
    tier = RamTier(4 * layout.page_bytes)
    tier.put([make_page(0)])
    assert tier.reserve(layout.page_bytes)
    place = address_of(tier, 0)
    tier.hold(PageVersion(PageKey("s", 0), 1), place)
    assert tier.reservable_bytes == 3 * layout.page_bytes
    tier.put([make_page(0)], backed=True)
    assert address_of(tier, 0) == place
    tier.release(PageVersion(PageKey("s", 0), 1))
    tier.put([make_page(index) for index in range(1, 5)], backed=True)
    assert stored_indices(tier) == [1, 2, 3, 4]
    tier.check()


def test_memory_that_readers_have_elsewhere_is_given_back() -> None:
    """Of pages that are dropped for them; otherwise the process would have the limit almost twice."""
    layout = PageLayout(4, 4, 64, torch.float32, "large", 64)
    tier = RamTier(64 * layout.page_bytes)
    rows = torch.ones(layout.rows_shape(layout.page_tokens))
    for index in range(64):
        key = PageKey("s", index)
        tier.put([(key, encode_page(layout, key, 1, rows))], backed=True)
    before = psutil.Process().memory_info().rss
    assert tier.reserve(48 * layout.page_bytes)
    given_back = before - psutil.Process().memory_info().rss
    assert given_back > 40 * layout.page_bytes
    assert len(stored_indices(tier)) == 16


def test_pages_that_are_here_when_their_bytes_are_reserved_are_not_dropped_for_them(
    layout: PageLayout, make_rows: Callable[..., torch.Tensor], make_page: MakePage
) -> None:
    """But for encoded ones and those of another version: what readers get of these lies elsewhere."""
    tier = RamTier(8 * layout.page_bytes)
    encoded = PageKey("s", 1)
    rows = make_rows(layout.page_tokens)
    tier.put([make_page(0)], backed=True)
    tier.put([(encoded, encode_page(layout, encoded, 1, rows, Codec.INT8))], backed=True)
    tier.put([make_page(2, 2)], backed=True)
    tier.put([make_page(index) for index in range(3, 8)], backed=True)
    versions = [PageVersion(PageKey("s", index), 1) for index in (0, 1, 2, 9)]
    assert tier.reserve(4 * layout.page_bytes, versions)
    tier.put([make_page(index) for index in range(10, 14)], backed=True)
    assert stored_indices(tier) == [0, 10, 11, 12, 13]
    tier.check()


def test_a_page_that_was_written_anew_is_not_let_go_with_its_old_version(
    layout: PageLayout, make_page: MakePage
) -> None:
    tier = RamTier(4 * layout.page_bytes)
    old, new = (PageVersion(PageKey("s", 0), sequence) for sequence in (1, 2))
    tier.put([make_page(0, 1)], backed=True)
    assert tier.reserve(layout.page_bytes, [old])
    tier.put([make_page(0, 2)], backed=True)
    assert tier.held_bytes == 0
    assert tier.reserve(2 * layout.page_bytes, [new])
    tier.release(old)
    assert tier.held_bytes == layout.page_bytes
    tier.put([make_page(index) for index in range(1, 6)], backed=True)
    assert tier.contains([new.key]) == [True]
    tier.check()
