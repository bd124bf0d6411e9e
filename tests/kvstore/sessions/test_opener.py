"""Opening a session gives it exactly the pages that it is opened with."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvstore.format.page import PageLayout
from kvstore.store import RowStore
from kvstore.tiers.ram import RamTier
from tests.kvstore.stored_rows import append, get_pages, list_stored, name_pages, read_all, write

OpenStore = Callable[..., RowStore]
MakeRows = Callable[..., Tensor]


def test_reopening_a_session_discards_what_it_was_not_opened_with(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    store = open_store()
    rows = make_rows(24)
    ids = write(store, "a", rows)
    for seed in range(5):
        append(store, "a", make_rows(20, seed=seed + 1))
        store.open("a", ids)
        assert torch.equal(read_all(store, "a"), rows)
        assert store.flush("a")
        store.check()


def test_a_session_may_be_opened_with_pages_of_another_one(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    store = open_store()
    rows = make_rows(29)
    ids = write(store, "a", rows)
    store.open("b", [])
    store.open("b", ids[:2])
    assert torch.equal(read_all(store, "b"), rows[:, :, :, :16])
    assert store.missing_pages("b") == []
    store.open("b", [])
    assert store.length("b") == 0
    append(store, "b", rows)
    assert store.flush("b")
    store.check()


def test_pages_of_an_aborted_turn_that_no_tier_accepted_are_not_written_any_more(
    layout: PageLayout, make_rows: MakeRows, blocked_tier: Any
) -> None:
    store = RowStore(layout, [blocked_tier])
    blocked_tier.release.set()
    rows = make_rows(16)
    ids = write(store, "a", rows)
    blocked_tier.failing = True
    append(store, "a", make_rows(16, seed=1))
    assert not store.flush("a")
    store.open("a", ids)
    append(store, "a", make_rows(16, seed=2))
    assert not store.flush("a")
    store.truncate("a", 16)
    kept = make_rows(8, seed=3)
    append(store, "a", kept)
    blocked_tier.failing = False
    assert store.flush("a")
    expected = torch.cat([rows, kept], 3)
    assert list_stored(store) == set(name_pages(expected, layout.page_tokens))
    assert torch.equal(read_all(store, "a"), expected)
    store.close()


def test_pages_of_an_aborted_turn_that_another_session_has_are_written(
    layout: PageLayout, make_rows: MakeRows, blocked_tier: Any
) -> None:
    store = RowStore(layout, [RamTier(1 << 20), blocked_tier])
    rows = make_rows(16)
    for session in "ab":
        append(store, session, rows)
    store.truncate("a", 0)
    store.open("b", get_pages(store, "b"))
    blocked_tier.release.set()
    assert store.flush("b")
    assert torch.equal(read_all(store, "b"), rows)
    assert list_stored(store) == set(name_pages(rows, layout.page_tokens))
    store.close()
