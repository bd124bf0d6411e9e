"""Sessions are opened under an epoch, forks share whole pages, and what is shared outlives who wrote it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvstore.errors import MissingPageError, RowRangeError, StaleWriterError
from kvstore.format.codec import Codec
from kvstore.format.page import PageKey, PageLayout
from kvstore.format.page_table import PageTable, SharedPages
from kvstore.store import RowStore
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.tiers.ram import RamTier

OpenStore = Callable[..., RowStore]
MakeRows = Callable[..., Tensor]


def everything(store: RowStore, session: str) -> Tensor:
    return store.gather(session, torch.arange(store.length(session)))


def said(store: RowStore, session: str, rows: Tensor) -> None:
    """A first turn: opened, appended, flushed."""
    store.open(session, epoch=1, length=0)
    store.append(session, rows)
    assert store.flush(session)


def page_bytes(store: RowStore) -> int:
    return store.usage()["nvme"]


def test_a_lineage_says_who_wrote_each_page() -> None:
    table = PageTable(
        "c", [SharedPages("s", 3), SharedPages("f", 5), SharedPages("g", 4)], [1, 2, 3, 4, 5, 6]
    )
    assert [table.key(index).session for index in range(6)] == ["s", "s", "s", "f", "f", "c"]
    assert table.own_keys() == [PageKey("c", 5)]
    assert table.owners == {"s", "f", "g", "c"}
    with pytest.raises(RowRangeError):
        table.truncate(4)


def test_a_fork_stores_no_row_of_a_whole_page_again(
    open_store: OpenStore, make_rows: MakeRows, layout: PageLayout
) -> None:
    store = open_store()
    rows = make_rows(80)
    said(store, "a", rows)
    before = page_bytes(store)
    for number in range(20):
        store.fork("a", f"b{number}", epoch=1, length=80, shared=[SharedPages("a", 10)])
    assert all(torch.equal(everything(store, f"b{number}"), rows) for number in range(20))
    assert page_bytes(store) == before
    store.check()


@pytest.mark.parametrize("length", [0, 7, 8, 29, 45])
def test_parent_and_fork_go_on_apart(
    open_store: OpenStore, make_rows: MakeRows, length: int
) -> None:
    store = open_store()
    rows = make_rows(45)
    mine = make_rows(21, seed=1)
    other = make_rows(30, seed=2)
    said(store, "a", rows)
    store.fork("a", "b", epoch=1, length=length, shared=[SharedPages("a", length // 8)])
    store.append("b", mine)
    store.append("a", other)
    wanted = {"a": torch.cat([rows, other], 3), "b": torch.cat([rows[:, :, :, :length], mine], 3)}
    for session, all_rows in wanted.items():
        assert store.flush(session)
        assert torch.equal(everything(store, session), all_rows)
        keys = torch.cat([keys for _, keys in store.scan_keys(session)], 2)
        assert torch.equal(keys, all_rows[:, 0])
    store.check()
    store.close()
    again = open_store()
    again.open("a", epoch=2, length=75)
    again.open("b", epoch=2, length=length + 21, shared=[SharedPages("a", length // 8)])
    assert {session: again.missing_pages(session) for session in "ab"} == {"a": [], "b": []}
    assert all(
        torch.equal(everything(again, session), all_rows) for session, all_rows in wanted.items()
    )
    again.check()


def test_a_fork_of_a_fork_names_both_before_it(open_store: OpenStore, make_rows: MakeRows) -> None:
    store = open_store()
    rows = make_rows(30)
    more = make_rows(30, seed=1)
    said(store, "a", rows)
    store.fork("a", "b", epoch=1, length=20, shared=[SharedPages("a", 2)])
    store.append("b", more)
    lineage = [SharedPages("a", 2), SharedPages("b", 5)]
    store.fork("b", "c", epoch=1, length=43, shared=lineage)
    wanted = torch.cat([rows[:, :, :, :20], more[:, :, :, :23]], 3)
    assert torch.equal(everything(store, "c"), wanted)
    assert store.flush("c")
    store.delete("b", keep_pages=5)
    store.delete("a", keep_pages=2)
    store.check()
    assert torch.equal(everything(store, "c"), wanted)
    store.close()
    again = open_store()
    assert again.retain_only(["c"], [SharedPages("a", 2), SharedPages("b", 5)]) == ["a", "b"]
    again.open("c", epoch=2, length=43, shared=lineage)
    assert torch.equal(everything(again, "c"), wanted)
    again.check()
    for session in "abc":
        again.delete(session)
    assert set(again.usage().values()) == {0}


def test_a_fork_at_an_earlier_turn_has_the_rows_of_then(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    store = open_store()
    rows = make_rows(60)
    said(store, "a", rows)
    store.fork("a", "b", epoch=1, length=29, shared=[SharedPages("a", 3)])
    assert torch.equal(everything(store, "b"), rows[:, :, :, :29])
    assert store.truncate("b", 25) is None
    assert torch.equal(everything(store, "b"), rows[:, :, :, :25])
    for refused in (23, 0):
        with pytest.raises(RowRangeError, match="shares its first 3 pages"):
            store.truncate("b", refused)
    with pytest.raises(RowRangeError, match="cannot have 23"):
        store.open("b", epoch=1, length=23, shared=[SharedPages("a", 3)])
    with pytest.raises(RowRangeError, match="parent 'a' has 60"):
        store.fork("a", "c", epoch=1, length=61, shared=[])
    assert torch.equal(everything(store, "a"), rows)


def test_a_crash_between_a_fork_and_its_first_rows_costs_nothing(
    open_store: OpenStore, make_rows: MakeRows, tmp_path: Path, layout: PageLayout
) -> None:
    store = open_store()
    rows = make_rows(29)
    more = make_rows(10, seed=1)
    said(store, "a", rows)
    store.fork("a", "b", epoch=1, length=24, shared=[SharedPages("a", 3)])
    # Nothing of it is in a file: whoever opens it has only the catalog's word that it is there.
    store.close()
    again = open_store()
    assert again.retain_only(["a", "b"]) == []
    again.open("b", epoch=2, length=24, shared=[SharedPages("a", 3)])
    assert torch.equal(everything(again, "b"), rows[:, :, :, :24])
    again.append("b", more)
    assert again.flush("b")
    assert torch.equal(everything(again, "b"), torch.cat([rows[:, :, :, :24], more], 3))
    again.check()


def test_a_fork_that_is_made_again_begins_anew(open_store: OpenStore, make_rows: MakeRows) -> None:
    store = open_store()
    rows = make_rows(29)
    said(store, "a", rows)
    for _ in range(2):
        store.fork("a", "b", epoch=1, length=29, shared=[SharedPages("a", 3)])
        assert torch.equal(everything(store, "b"), rows)
        store.append("b", make_rows(20, seed=1))
        assert store.flush("b")
    store.check()


def test_a_session_that_is_opened_twice_is_the_same(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    store = open_store()
    rows = make_rows(29)
    said(store, "a", rows)
    for epoch in (1, 1, 2, 3, 7):
        store.append("a", make_rows(20, seed=epoch))
        store.open("a", epoch=epoch, length=29)
        assert torch.equal(everything(store, "a"), rows)
        store.check()
    with pytest.raises(StaleWriterError):
        store.open("a", epoch=6, length=29)
    assert torch.equal(everything(store, "a"), rows)


def test_what_was_cut_at_opening_is_cut_in_the_files_too(
    open_store: OpenStore, make_rows: MakeRows, layout: PageLayout
) -> None:
    store = open_store()
    said(store, "a", make_rows(60))
    store.open("a", epoch=2, length=29)
    found = {
        header.key.index: header.valid_tokens for header in store._stack.tiers.lowest.stored("a")
    }
    assert found == {0: 8, 1: 8, 2: 8, 3: 5}


def test_first_words_of_another_session_are_taken_by_opening(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    store = open_store()
    rows = make_rows(29)
    said(store, "a", rows)
    store.open("b", epoch=1, length=0)
    store.open("b", epoch=1, length=16, shared=[SharedPages("a", 2)])
    assert torch.equal(everything(store, "b"), rows[:, :, :, :16])
    assert store.missing_pages("b") == []
    store.open("b", epoch=1, length=0)
    assert store.length("b") == 0
    store.append("b", rows)
    assert store.flush("b")
    store.check()


def test_first_words_that_are_on_their_way_are_taken_too(
    layout: PageLayout, make_rows: MakeRows, held_tier: Any
) -> None:
    store = RowStore(layout, [RamTier(1 << 20), held_tier])
    rows = make_rows(29)
    store.append("a", rows)
    store.fork("a", "b", epoch=1, length=16, shared=[SharedPages("a", 2)])
    assert torch.equal(everything(store, "b"), rows[:, :, :, :16])
    held_tier.release.set()
    assert store.flush("b"), "the pages of the parent too"
    store.check()
    store.close()


def test_pages_that_were_never_stored_are_missing_and_those_behind_them_stay(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    store = open_store()
    rows = make_rows(29)
    said(store, "a", rows)
    store._stack.tiers.lowest.delete([PageKey("a", 1)])
    store.close()
    again = open_store()
    again.open("a", epoch=2, length=40)
    assert again.missing_pages("a") == [1, 3, 4], "page 3 has too few rows"
    assert torch.equal(again.gather("a", torch.arange(16, 24)), rows[:, :, :, 16:24])
    with pytest.raises(MissingPageError):
        again.gather("a", torch.tensor([9]))
    with pytest.raises(MissingPageError):
        list(again.scan_keys("a"))


def test_retain_drops_only_what_an_earlier_process_left(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    store = open_store()
    for session in "abcd":
        said(store, session, make_rows(29))
    store.close()
    again = open_store()
    again.open("d", epoch=2, length=29)
    again.open("e", epoch=1, length=0)
    assert again.retain_only(["a"], [SharedPages("b", 2)]) == ["b", "c"]
    assert again.retain_only(["a"]) == []
    found = {
        (header.key.session, header.key.index) for header in again._stack.tiers.lowest.stored()
    }
    assert found == {(session, index) for session in "ad" for index in range(4)} | {
        ("b", 0),
        ("b", 1),
    }
    again.check()


def test_a_released_session_is_found_again_where_nobody_else_could_take_it(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    store = open_store()
    rows = make_rows(29)
    store.open("a", epoch=1, length=0)
    store.append("a", rows)
    store.release("a")
    assert store.retain_only([]) == [], "it was not left by an earlier process"
    store.check()
    store.open("a", epoch=2, length=29)
    assert torch.equal(everything(store, "a"), rows)


def test_a_forks_copied_rows_stay_exact_under_int8(
    layout: PageLayout, make_rows: MakeRows, tmp_path: Path
) -> None:
    codecs = [Codec.RAW, Codec.INT8]
    store = RowStore(layout, [RamTier(1 << 20), NvmeTier(tmp_path / "rows")], codecs=codecs)
    rows = make_rows(29)
    more = make_rows(11, seed=1)
    said(store, "a", rows)
    store.fork("a", "b", epoch=1, length=29, shared=[SharedPages("a", 3)])
    assert torch.equal(everything(store, "b"), everything(store, "a"))
    assert torch.equal(everything(store, "b")[:, :, :, 24:], rows[:, :, :, 24:])
    alone = torch.cat([rows, more], 3)
    store.append("b", more)
    said(store, "c", alone)
    assert torch.equal(everything(store, "b"), everything(store, "c")), (
        "as one that never was a fork"
    )
    store.close()
