"""Forks share whole pages, which outlive the session that wrote them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvstore.errors import RowRangeError
from kvstore.format.codec import Codec
from kvstore.format.page import PageLayout
from kvstore.format.page_table import SharedPages
from kvstore.store import RowStore
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.tiers.ram import RamTier

OpenStore = Callable[..., RowStore]
MakeRows = Callable[..., Tensor]


def read_all(store: RowStore, session: str) -> Tensor:
    return store.gather(session, torch.arange(store.length(session)))


def write_first_turn(store: RowStore, session: str, rows: Tensor) -> None:
    """Open a session, append rows and flush them."""
    store.open(session, epoch=1, length=0)
    store.append(session, rows)
    assert store.flush(session)


def page_bytes(store: RowStore) -> int:
    return store.usage()["nvme"]


def test_a_fork_stores_no_page_twice(
    open_store: OpenStore, make_rows: MakeRows, layout: PageLayout
) -> None:
    store = open_store()
    rows = make_rows(80)
    write_first_turn(store, "a", rows)
    before = page_bytes(store)
    for number in range(20):
        store.fork("a", f"b{number}", epoch=1, length=80, shared=[SharedPages("a", 10)])
    assert all(torch.equal(read_all(store, f"b{number}"), rows) for number in range(20))
    assert page_bytes(store) == before
    store.check()


@pytest.mark.parametrize("length", [0, 8, 24, 40])
def test_parent_and_fork_continue_independently(
    open_store: OpenStore, make_rows: MakeRows, length: int
) -> None:
    store = open_store()
    rows = make_rows(45)
    mine = make_rows(24, seed=1)
    other = make_rows(35, seed=2)
    write_first_turn(store, "a", rows)
    store.fork("a", "b", epoch=1, length=length, shared=[SharedPages("a", length // 8)])
    store.append("b", mine)
    store.append("a", other)
    expected = {"a": torch.cat([rows, other], 3), "b": torch.cat([rows[:, :, :, :length], mine], 3)}
    for session, all_rows in expected.items():
        assert store.flush(session)
        assert torch.equal(read_all(store, session), all_rows)
        keys = torch.cat([keys for _, keys in store.scan_keys(session)], 2)
        assert torch.equal(keys, all_rows[:, 0])
    store.check()
    store.close()
    again = open_store()
    again.open("a", epoch=2, length=80)
    again.open("b", epoch=2, length=length + 24, shared=[SharedPages("a", length // 8)])
    assert {session: again.missing_pages(session) for session in "ab"} == {"a": [], "b": []}
    assert all(
        torch.equal(read_all(again, session), all_rows) for session, all_rows in expected.items()
    )
    again.check()


def test_a_fork_of_a_fork_references_both_ancestors(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    store = open_store()
    rows = make_rows(30)
    more = make_rows(30, seed=1)
    last = make_rows(8, seed=2)
    write_first_turn(store, "a", rows)
    store.fork("a", "b", epoch=1, length=16, shared=[SharedPages("a", 2)])
    store.append("b", more)
    shared = [SharedPages("a", 2), SharedPages("b", 5)]
    store.fork("b", "c", epoch=1, length=40, shared=shared)
    store.append("c", last)
    expected = torch.cat([rows[:, :, :, :16], more[:, :, :, :24], last], 3)
    assert torch.equal(read_all(store, "c"), expected)
    assert store.flush("c")
    store.delete("b", keep_pages=5)
    store.delete("a", keep_pages=2)
    store.check()
    assert torch.equal(read_all(store, "c"), expected)
    store.close()
    again = open_store()
    assert again.unclaimed() == ["a", "b", "c"]
    assert again.delete_unclaimed("a", keep_pages=2)
    assert again.delete_unclaimed("b", keep_pages=5)
    again.open("c", epoch=2, length=48, shared=shared)
    assert torch.equal(read_all(again, "c"), expected)
    again.check()
    for session in "abc":
        again.delete(session)
    assert set(again.usage().values()) == {0}


def test_a_fork_at_an_earlier_turn_has_the_rows_of_that_turn(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    store = open_store()
    rows = make_rows(60)
    write_first_turn(store, "a", rows)
    store.fork("a", "b", epoch=1, length=24, shared=[SharedPages("a", 3)])
    assert torch.equal(read_all(store, "b"), rows[:, :, :, :24])
    store.append("b", make_rows(13, seed=1))
    store.truncate("b", 24)
    assert torch.equal(read_all(store, "b"), rows[:, :, :, :24])
    for refused in (16, 0):
        with pytest.raises(RowRangeError, match="shares its first 3 pages"):
            store.truncate("b", refused)
    with pytest.raises(RowRangeError, match="cannot have 16"):
        store.open("b", epoch=1, length=16, shared=[SharedPages("a", 3)])
    assert torch.equal(read_all(store, "b"), rows[:, :, :, :24])
    assert torch.equal(read_all(store, "a"), rows)


@pytest.mark.parametrize(
    ("length", "pages"),
    [
        (29, 3),  # the rows behind the shared pages would have to be copied
        (24, 2),
        (24, 4),
        (8, 0),
        (64, 8),  # the parent has 7 whole pages
    ],
)
def test_a_fork_that_is_not_its_shared_pages_is_refused(
    open_store: OpenStore, make_rows: MakeRows, length: int, pages: int
) -> None:
    store = open_store()
    rows = make_rows(60)
    write_first_turn(store, "a", rows)
    with pytest.raises(RowRangeError, match="parent 'a' has 60"):
        store.fork("a", "b", epoch=1, length=length, shared=[SharedPages("a", pages)])
    assert store.sessions() == ["a"]
    assert torch.equal(read_all(store, "a"), rows)


def test_a_crash_between_a_fork_and_its_first_rows_loses_nothing(
    open_store: OpenStore, make_rows: MakeRows, tmp_path: Path, layout: PageLayout
) -> None:
    store = open_store()
    rows = make_rows(29)
    more = make_rows(10, seed=1)
    write_first_turn(store, "a", rows)
    store.fork("a", "b", epoch=1, length=24, shared=[SharedPages("a", 3)])
    # No file has a page of the fork: only the catalog knows that it exists.
    store.close()
    again = open_store()
    assert again.unclaimed() == ["a"]
    again.open("b", epoch=2, length=24, shared=[SharedPages("a", 3)])
    assert torch.equal(read_all(again, "b"), rows[:, :, :, :24])
    again.append("b", more)
    assert again.flush("b")
    assert torch.equal(read_all(again, "b"), torch.cat([rows[:, :, :, :24], more], 3))
    again.check()


def test_a_repeated_fork_starts_over(open_store: OpenStore, make_rows: MakeRows) -> None:
    store = open_store()
    rows = make_rows(29)
    write_first_turn(store, "a", rows)
    for _ in range(2):
        store.fork("a", "b", epoch=1, length=24, shared=[SharedPages("a", 3)])
        assert torch.equal(read_all(store, "b"), rows[:, :, :, :24])
        store.append("b", make_rows(20, seed=1))
        assert store.flush("b")
    store.check()


def test_queued_pages_can_be_shared(
    layout: PageLayout, make_rows: MakeRows, blocked_tier: Any
) -> None:
    store = RowStore(layout, [RamTier(1 << 20), blocked_tier])
    rows = make_rows(29)
    store.append("a", rows)
    store.fork("a", "b", epoch=1, length=16, shared=[SharedPages("a", 2)])
    assert torch.equal(read_all(store, "b"), rows[:, :, :, :16])
    blocked_tier.release.set()
    assert store.flush("b"), "the pages of the parent too"
    store.check()
    store.close()


def test_a_fork_under_int8_has_the_rows_of_a_session_that_is_no_fork(
    layout: PageLayout, make_rows: MakeRows, tmp_path: Path
) -> None:
    codecs = [Codec.RAW, Codec.INT8]
    store = RowStore(layout, [RamTier(1 << 20), NvmeTier(tmp_path / "rows")], codecs=codecs)
    rows = make_rows(29)
    more = make_rows(11, seed=1)
    write_first_turn(store, "a", rows)
    store.fork("a", "b", epoch=1, length=24, shared=[SharedPages("a", 3)])
    assert torch.equal(read_all(store, "b"), read_all(store, "a")[:, :, :, :24])
    assert not torch.equal(read_all(store, "b"), rows[:, :, :, :24])
    store.append("b", more)
    write_first_turn(store, "c", torch.cat([rows[:, :, :, :24], more], 3))
    assert torch.equal(read_all(store, "b"), read_all(store, "c"))
    store.close()
