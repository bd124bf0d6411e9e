"""The RAM tier observes its limit and drops only pages that a lower tier holds."""

import resource
from collections.abc import Callable

import psutil
import pytest
import torch

from kvstore.errors import TierFullError, TierSettingsError
from kvstore.format.codec import Codec, decode_page, encode_page
from kvstore.format.page import HEADER_BYTES, PageId, PageLayout, parse_header
from kvstore.tiers.ram import RamTier
from tests.kvstore.page_ids import make_id, make_ids

MakePage = Callable[..., tuple[PageId, bytes]]
NUMBERS = {make_id(number): number for number in range(100)}


def stored_numbers(tier: RamTier) -> list[int]:
    return sorted(NUMBERS[header.id] for header in tier.stored())


def test_the_coldest_backed_page_is_dropped_first(layout: PageLayout, make_page: MakePage) -> None:
    tier = RamTier(3 * layout.page_bytes)
    tier.put([make_page(number) for number in range(3)], backed=True)
    tier.get([make_id(0)])
    tier.put([make_page(3)], backed=True)
    assert stored_numbers(tier) == [0, 2, 3]
    tier.check()


def test_an_unbacked_page_is_never_dropped(layout: PageLayout, make_page: MakePage) -> None:
    tier = RamTier(2 * layout.page_bytes)
    tier.put([make_page(0)])
    tier.put([make_page(1)], backed=True)
    tier.put([make_page(2)], backed=True)
    assert stored_numbers(tier) == [0, 2]
    tier.put([make_page(3)])
    with pytest.raises(TierFullError):
        tier.put([make_page(4)], backed=True)
    assert stored_numbers(tier) == [0, 3]
    tier.check()


def test_a_page_that_became_backed_may_be_dropped(layout: PageLayout, make_page: MakePage) -> None:
    tier = RamTier(layout.page_bytes)
    tier.put([make_page(0)])
    tier.put([make_page(0)], backed=True)
    tier.put([make_page(1)], backed=True)
    assert stored_numbers(tier) == [1]


def test_a_page_that_no_lower_tier_has_any_more_is_kept(
    layout: PageLayout, make_page: MakePage
) -> None:
    tier = RamTier(2 * layout.page_bytes)
    tier.put([make_page(0), make_page(1)], backed=True)
    tier.put([make_page(0)])
    tier.put([make_page(2)], backed=True)
    assert stored_numbers(tier) == [0, 2]
    tier.check()


def test_a_refused_put_drops_nothing(layout: PageLayout, make_page: MakePage) -> None:
    tier = RamTier(layout.page_bytes)
    tier.put([make_page(0)], backed=True)
    with pytest.raises(TierFullError):
        tier.put([(make_id(1), make_page(1)[1] + b"\0")])
    assert stored_numbers(tier) == [0]


def test_a_page_that_is_read_stays_intact_after_it_was_dropped(
    layout: PageLayout, make_page: MakePage
) -> None:
    tier = RamTier(2 * layout.page_bytes)
    tier.put([make_page(0), make_page(1)])
    (read,) = tier.get([make_id(0)])
    assert read is not None
    rows = decode_page(layout, parse_header(read), read)
    expected = rows.clone()
    del read
    for number in range(2, 9):
        tier.delete(make_ids(range(number)))
        tier.put([make_page(number)])
    assert torch.equal(rows, expected)
    tier.check()


def test_get_returns_views_without_copying(layout: PageLayout, make_page: MakePage) -> None:
    tier = RamTier(2 * layout.page_bytes)
    tier.put([make_page(0)])
    addresses = []
    for _ in range(2):
        (read,) = tier.get([make_id(0)])
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


def address_of(tier: RamTier, number: int) -> int:
    """Where the rows of a resident page lie."""
    (blob,) = tier.get([make_id(number)])
    assert blob is not None
    return torch.frombuffer(blob, dtype=torch.uint8).data_ptr() + HEADER_BYTES


def test_pages_have_what_readers_do_not_reserve(layout: PageLayout, make_page: MakePage) -> None:
    tier = RamTier(8 * layout.page_bytes)
    tier.put([make_page(number) for number in range(8)], backed=True)
    assert tier.reserve(5 * layout.page_bytes)
    assert stored_numbers(tier) == [5, 6, 7]
    tier.put([make_page(8)], backed=True)
    assert stored_numbers(tier) == [6, 7, 8]
    assert tier.reserve(0)
    tier.put([make_page(number) for number in range(5)], backed=True)
    assert stored_numbers(tier) == [0, 1, 2, 3, 4, 6, 7, 8]
    tier.check()


def test_a_held_page_counts_once_and_is_not_dropped(
    layout: PageLayout, make_page: MakePage
) -> None:
    tier = RamTier(8 * layout.page_bytes)
    tier.put([make_page(number) for number in range(5)], backed=True)
    assert tier.reserve(3 * layout.page_bytes)
    places = [address_of(tier, number) for number in range(3)]
    for number, place in enumerate(places):
        tier.hold(make_id(number), place)
    tier.put([make_page(number) for number in range(5, 11)], backed=True)
    assert stored_numbers(tier) == [0, 1, 2, 6, 7, 8, 9, 10]
    tier.check()
    tier.release(make_id(0))
    assert tier.room_bytes == 6 * layout.page_bytes
    for number in range(11, 17):
        tier.put([make_page(number)], backed=True)
    assert stored_numbers(tier) == [1, 2, *range(11, 17)]
    tier.check()


def test_a_page_whose_reader_has_it_elsewhere_is_as_any_other(
    layout: PageLayout, make_page: MakePage
) -> None:
    tier = RamTier(4 * layout.page_bytes)
    tier.put([make_page(0), make_page(1)], backed=True)
    assert tier.reserve(2 * layout.page_bytes)
    elsewhere = torch.empty(layout.page_bytes, dtype=torch.uint8)
    tier.hold(make_id(0), elsewhere.data_ptr())
    tier.hold(make_id(9), elsewhere.data_ptr())
    tier.put([make_page(2)], backed=True)
    assert stored_numbers(tier) == [1, 2]
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
    tier.put([make_page(number) for number in range(2, 5)])
    assert tier.reservable_bytes == 3 * layout.page_bytes
    assert not tier.reserve(3 * layout.page_bytes + 1)
    assert stored_numbers(tier) == [0, 1, 2, 3, 4]
    tier.check()


def test_a_held_page_stays_where_it_is_when_a_lower_tier_has_it_too(
    layout: PageLayout, make_page: MakePage
) -> None:
    tier = RamTier(4 * layout.page_bytes)
    tier.put([make_page(0)])
    assert tier.reserve(layout.page_bytes)
    place = address_of(tier, 0)
    tier.hold(make_id(0), place)
    assert tier.reservable_bytes == 3 * layout.page_bytes
    tier.put([make_page(0)], backed=True)
    assert address_of(tier, 0) == place
    tier.release(make_id(0))
    tier.put([make_page(number) for number in range(1, 5)], backed=True)
    assert stored_numbers(tier) == [1, 2, 3, 4]
    tier.check()


def test_memory_that_readers_have_elsewhere_is_given_back() -> None:
    """Of pages that are dropped for them; otherwise the process would have the limit almost twice."""
    layout = PageLayout(4, 4, 64, torch.float32, "large", 64)
    tier = RamTier(64 * layout.page_bytes)
    rows = torch.ones(layout.rows_shape(layout.page_tokens))
    for number in range(64):
        page_id = make_id(number)
        tier.put([(page_id, encode_page(layout, page_id, rows, written_at=1))], backed=True)
    before = psutil.Process().memory_info().rss
    assert tier.reserve(48 * layout.page_bytes)
    given_back = before - psutil.Process().memory_info().rss
    assert given_back > 40 * layout.page_bytes
    assert len(stored_numbers(tier)) == 16


def test_pages_that_are_here_when_their_bytes_are_reserved_are_not_dropped_for_them(
    layout: PageLayout, make_rows: Callable[..., torch.Tensor], make_page: MakePage
) -> None:
    """But for encoded ones: what readers get of these lies elsewhere."""
    tier = RamTier(8 * layout.page_bytes)
    rows = make_rows(layout.page_tokens)
    encoded = encode_page(layout, make_id(1), rows, Codec.INT8, written_at=1)
    tier.put([make_page(0), (make_id(1), encoded)], backed=True)
    tier.put([make_page(number) for number in range(2, 8)], backed=True)
    assert tier.reserve(4 * layout.page_bytes, [make_id(number) for number in (0, 1, 9)])
    tier.put([make_page(number) for number in range(10, 14)], backed=True)
    assert stored_numbers(tier) == [0, 10, 11, 12, 13]
    tier.check()


def test_a_page_that_was_deleted_and_put_again_is_held_by_nobody(
    layout: PageLayout, make_page: MakePage
) -> None:
    """Its reader has the memory of the page that was deleted."""
    tier = RamTier(4 * layout.page_bytes)
    tier.put([make_page(0)], backed=True)
    assert tier.reserve(layout.page_bytes, [make_id(0)])
    assert tier.held_bytes == layout.page_bytes
    tier.delete([make_id(0)])
    tier.put([make_page(0)], backed=True)
    assert tier.held_bytes == 0
    tier.release(make_id(0))
    assert tier.room_bytes == 3 * layout.page_bytes
    tier.check()
