"""A summary bounds every key of its page and is discarded with the page."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvstore.errors import RowRangeError
from kvstore.format.page import HEADER_BYTES, PageKey, PageLayout
from kvstore.format.page_table import ExpectedPage
from kvstore.format.summaries import (
    Bits,
    PageSummaries,
    PageSummary,
    get_midpoints,
    summarise,
    unpack_codes,
)
from kvstore.host_cache import HostCache
from kvstore.store import RowStore
from kvstore.tiers.ram import RamTier

OpenStore = Callable[..., RowStore]
MakeRows = Callable[..., Tensor]


def midpoints(summary: PageSummary) -> Tensor:
    codes = unpack_codes(summary.high, summary.low, summary.lowest.shape[-1])
    return get_midpoints(codes, summary.lowest.unsqueeze(2), summary.bin_width.unsqueeze(2))


@settings(deadline=None, max_examples=60)
@given(
    bits=st.sampled_from([4, 8, 12]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    head_dim=st.integers(1, 9),
    scale=st.sampled_from([1e-30, 1e-3, 1.0, 300.0]),
    offset=st.sampled_from([0.0, 1.0, -1000.0]),
    seed=st.integers(0, 99),
)
def test_box_and_codes_are_true_bounds(
    bits: Bits, dtype: torch.dtype, head_dim: int, scale: float, offset: float, seed: int
) -> None:
    keys = (
        torch.randn(2, 3, 16, head_dim, generator=torch.Generator().manual_seed(seed)) * scale
        + offset
    )
    keys[0, 0, :, 0] = offset  # A box of width zero.
    keys = keys.to(dtype)
    summary = summarise(keys, bits)
    assert summary is not None
    exact = keys.double()
    assert (
        (exact - midpoints(summary).double()).abs() <= summary.max_error.unsqueeze(2).double()
    ).all()
    assert (exact >= summary.lowest.unsqueeze(2).double()).all()
    assert torch.equal(summary.lowest, keys.float().amin(2))
    width = keys.float().amax(2) - keys.float().amin(2)
    rounding = keys.float().abs().amax(2) * 1e-6
    assert (summary.max_error <= width / (1 << bits) * 0.51 + rounding).all(), (
        "no more than half a bin"
    )
    assert torch.allclose(summary.highest, keys.float().amax(2), rtol=1e-5)


@pytest.mark.parametrize(("bits", "of_channel"), [(4, 0.5), (8, 1), (12, 1.5)])
def test_codes_take_their_number_of_bits(bits: Bits, of_channel: float) -> None:
    summary = summarise(torch.randn(2, 3, 64, 32), bits)
    assert summary is not None
    assert summary.bytes == 2 * 3 * 32 * (64 * of_channel + 3 * 4)


def test_keys_that_are_not_finite_have_no_summary() -> None:
    keys = torch.zeros(1, 1, 4, 2)
    keys[0, 0, 1, 1] = torch.inf
    assert summarise(keys, 8) is None


def test_summaries_stay_under_their_limit() -> None:
    keys = torch.randn(1, 1, 8, 4)
    one = summarise(keys, 8)
    assert one is not None
    summaries = PageSummaries(HostCache(2 * one.bytes + 1), 8)
    pages = [ExpectedPage(PageKey("s", index), index + 1) for index in range(3)]
    for page in pages:
        summaries.add(page, keys)
    assert [summaries.get(page) is None for page in pages] == [False, False, True]
    assert summaries.bytes == 2 * one.bytes
    summaries.discard([pages[0].key])
    summaries.add(pages[2], keys)
    assert [summaries.get(page) is None for page in pages] == [True, False, False]


def test_a_newer_version_replaces_an_older_one_and_never_the_reverse() -> None:
    summaries = PageSummaries(HostCache(1 << 20), 8)
    key = PageKey("s", 0)
    summaries.add(ExpectedPage(key, 5), torch.ones(1, 1, 8, 4))
    summaries.add(ExpectedPage(key, 4), torch.zeros(1, 1, 8, 4))
    assert summaries.get(ExpectedPage(key, 4)) is None
    summaries.add(ExpectedPage(key, 6), 2 * torch.ones(1, 1, 8, 4))
    assert summaries.get(ExpectedPage(key, 5)) is None
    newest = summaries.get(ExpectedPage(key, 6))
    assert newest is not None
    assert newest.lowest.unique().tolist() == [2]
    assert summaries.bytes == newest.bytes


# In the store: pages of 8 tokens.


def has_summaries(store: RowStore, rows: Tensor) -> list[bool]:
    """Return whether each page of session "a" has a summary; each summary must match the rows."""
    pages = range(-(-store.length("a") // 8))
    found = store.summaries("a", pages)
    for index, summary in zip(pages, found, strict=True):
        if summary is not None:
            assert torch.equal(summary.lowest, rows[:, 0, :, 8 * index : 8 * index + 8].amin(2))
    return [summary is not None for summary in found]


def test_full_pages_have_a_summary_once_they_are_written(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    store = open_store()
    rows = make_rows(29)
    store.append("a", rows)
    store.flush("a")
    assert has_summaries(store, rows) == [True, True, True, False]
    assert store.summary_bytes() == sum(s.bytes for s in store.summaries("a", [0, 1, 2]) if s)


def test_summaries_are_discarded_with_their_pages(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    store = open_store()
    rows = make_rows(40)
    other = make_rows(20, seed=5)
    store.append("a", rows)
    store.append("b", rows)
    store.flush("a")
    store.flush("b")
    of_one = store.summary_bytes() // 10
    store.truncate("a", 20)
    assert has_summaries(store, rows) == [True, True, False]
    store.append("a", other)
    store.flush("a")
    now = torch.cat([rows[:, :, :, :20], other], 3)
    assert has_summaries(store, now) == [True] * 5
    assert store.summary_bytes() == 10 * of_one
    store.delete("a")
    assert store.summary_bytes() == 5 * of_one
    store.delete("b")
    assert store.summary_bytes() == 0


def test_after_a_restart_reading_a_page_summarises_it_again(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    store = open_store()
    rows = make_rows(29)
    store.append("a", rows)
    store.close()
    again = open_store()
    assert has_summaries(again, rows) == [False] * 4
    again.read_keys("a", [2, 3])
    assert has_summaries(again, rows) == [False, False, True, False]


def test_without_room_pages_have_no_summary_and_stay_readable(
    layout: PageLayout, make_rows: MakeRows
) -> None:
    store = RowStore(layout, [RamTier(1 << 20)], host_cache=HostCache(0))
    rows = make_rows(24)
    store.append("a", rows)
    store.flush("a")
    assert has_summaries(store, rows) == [False] * 3
    assert torch.equal(torch.cat(store.read_keys("a", [0, 1, 2]).keys, 2), rows[:, 0])
    assert store.summary_bytes() == 0
    store.close()


def test_keys_are_returned_in_the_order_of_the_pages(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    store = open_store()
    rows = make_rows(29)
    store.append("a", rows)
    keys = store.read_keys("a", [3, 0, 2]).keys
    for found, part in zip(keys, [slice(24, 29), slice(0, 8), slice(16, 24)], strict=True):
        assert torch.equal(found, rows[:, 0, :, part])
    store.append("a", rows[:, :, :, :3])
    assert torch.equal(keys[0], rows[:, 0, :, 24:29]), "keys that were read do not change"
    with pytest.raises(RowRangeError):
        store.read_keys("a", [4])
    with pytest.raises(RowRangeError):
        store.summaries("a", [-1])


def test_only_pages_from_tiers_count_as_read(
    layout: PageLayout, make_rows: MakeRows, blocked_tier: Any
) -> None:
    store = RowStore(layout, [blocked_tier])
    rows = make_rows(29)
    store.append("a", rows)
    assert store.read_keys("a", [0, 1, 2, 3]).bytes_read == 0, "all of it is still in memory"
    blocked_tier.release.set()
    store.flush("a")
    before = store.tiers()["blocked"].counters.read_bytes
    unfinished = HEADER_BYTES + 5 * layout.token_bytes
    expected = 2 * layout.page_bytes + unfinished
    assert store.read_keys("a", [0, 2, 3]).bytes_read == expected
    assert store.tiers()["blocked"].counters.read_bytes - before == expected
    store.close()


def test_a_later_session_has_summaries_in_a_store_that_has_been_full_for_long(
    layout: PageLayout, make_rows: MakeRows
) -> None:
    """Sessions out of use make room, the least recently used ones first."""
    rows = make_rows(40)
    of_page = summarise(rows[:, 0, :, :8], 12)
    assert of_page is not None
    limit = 10 * of_page.bytes
    store = RowStore(layout, [RamTier(1 << 22)], host_cache=HostCache(limit))
    for number in range(20):
        name = f"idle-{number}"
        store.append(name, rows)
        store.flush(name)
        assert store.summary_bytes() <= limit
    store.summaries("idle-18", [0])  # a scan reads them: it is in use
    store.append("a", rows)
    store.flush("a")
    assert has_summaries(store, rows) == [True] * 5
    kept = [any(store.summaries(f"idle-{number}", range(5))) for number in range(20)]
    assert kept == [number == 18 for number in range(20)]
    store.read_keys("idle-3", range(5))
    assert all(store.summaries("idle-3", range(5))), "they are made again when they are needed"
    store.close()


def test_a_session_that_leaves_memory_keeps_no_summaries(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    store = open_store()
    for name, leave in (("a", store.unload), ("b", store.release)):
        store.append(name, make_rows(40))
        store.flush(name)
        assert store.summary_bytes() > 0
        leave(name)
        assert store.summary_bytes() == 0
    store.check()
