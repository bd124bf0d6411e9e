"""Sessions that begin alike have the same pages, which are stored once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvstore.errors import RowRangeError
from kvstore.format.codec import Codec
from kvstore.format.page import PageLayout
from kvstore.store import RowStore
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.tiers.ram import RamTier
from tests.kvstore.failing_files import FaultyTier
from tests.kvstore.stored_rows import (
    append,
    get_pages,
    list_stored,
    name_pages,
    open_session,
    read_all,
    write,
)

OpenStore = Callable[..., RowStore]
MakeRows = Callable[..., Tensor]


def test_no_page_is_stored_twice(
    open_store: OpenStore, make_rows: MakeRows, tmp_path: Path
) -> None:
    store = open_store(ram_pages=12)
    rows = make_rows(80)
    pages = write(store, "a", rows)
    before = store.usage()
    for number in range(20):
        store.open(f"b{number}", pages)
    write(store, "written again", rows)
    assert store.usage() == before
    segments = sum(path.stat().st_size for path in (tmp_path / "rows").glob("segment-*.kv"))
    assert segments < 1.1 * before["nvme"], "nor in a file that is compacted later"
    assert all(torch.equal(read_all(store, f"b{number}"), rows) for number in range(20))
    assert torch.equal(read_all(store, "written again"), rows)
    store.check()


def test_no_tier_stores_a_page_twice(
    layout: PageLayout, make_rows: MakeRows, tmp_path: Path
) -> None:
    files = [NvmeTier(tmp_path / name, name=name) for name in ("upper", "lower")]
    store = RowStore(layout, [RamTier(1 << 20), *files])
    rows = make_rows(40)
    for session in "abc":
        write(store, session, rows)
    assert set(store.usage().values()) == {5 * layout.page_bytes}
    assert [tier.file_bytes - tier.used_bytes < layout.page_bytes for tier in files] == [True, True]
    store.close()


@pytest.mark.parametrize("pages", [0, 1, 3, 5])
def test_sessions_continue_independently_from_shared_pages(
    open_store: OpenStore, make_rows: MakeRows, pages: int
) -> None:
    store = open_store()
    rows = make_rows(45)
    mine = make_rows(24, seed=1)
    other = make_rows(35, seed=2)
    ids = write(store, "a", rows)
    store.open("b", ids[:pages])
    append(store, "b", mine)
    append(store, "a", other)
    first = rows[:, :, :, : 8 * pages]
    expected = {"a": torch.cat([rows, other], 3), "b": torch.cat([first, mine], 3)}
    for session, all_rows in expected.items():
        assert store.flush(session)
        assert torch.equal(read_all(store, session), all_rows)
        keys = torch.cat([keys for _, keys in store.scan_keys(session)], 2)
        assert torch.equal(keys, all_rows[:, 0])
    store.check()
    store.close()
    again = open_store()
    for session, all_rows in expected.items():
        open_session(again, session, all_rows)
        assert again.missing_pages(session) == []
        assert torch.equal(read_all(again, session), all_rows)
    again.check()


def test_a_session_keeps_the_pages_of_deleted_ones(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    store = open_store()
    rows = make_rows(32)
    ids = write(store, "a", rows)
    store.open("b", ids[:2])
    append(store, "b", make_rows(16, seed=1))
    assert store.flush("b")
    expected = read_all(store, "b")
    for session in "ab":
        store.close_session(session)
    store.delete(ids[2:]).result()  # those of "a" alone, as the catalog knows
    store.close()
    again = open_store()
    open_session(again, "b", expected)
    assert torch.equal(read_all(again, "b"), expected)
    assert again.contains(ids) == [True, True, False, False]


def test_a_truncated_session_takes_no_page_from_others(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    store = open_store()
    rows = make_rows(60)
    store.open("b", write(store, "a", rows))
    append(store, "b", make_rows(13, seed=1))
    store.truncate("b", 24)
    assert torch.equal(read_all(store, "b"), rows[:, :, :, :24])
    with pytest.raises(RowRangeError, match="cannot truncate session 'b' to 32 tokens"):
        store.truncate("b", 32)
    assert torch.equal(read_all(store, "a"), rows)


def test_queued_pages_of_another_session_are_read_and_are_not_durable_yet(
    layout: PageLayout, make_rows: MakeRows, blocked_tier: Any
) -> None:
    store = RowStore(layout, [RamTier(1 << 20), blocked_tier])
    rows = make_rows(29)
    append(store, "a", rows)
    ids = name_pages(rows, layout.page_tokens)
    assert store.contains([*ids, bytes(16)]) == [True, True, True, False]
    store.open("b", ids[:2])
    assert store.missing_pages("b") == []
    assert torch.equal(read_all(store, "b"), rows[:, :, :, :16])
    store.close_session("a")
    flushed = store.begin_flush("b")
    assert not flushed.done()
    blocked_tier.release.set()
    assert flushed.result(timeout=30)
    assert list_stored(store) == set(ids), "those of a closed session too"
    store.check()
    store.close()


def test_queued_pages_of_another_session_that_are_refused_are_not_durable(
    layout: PageLayout, make_rows: MakeRows, tmp_path: Path
) -> None:
    files = FaultyTier(tmp_path / "rows")
    store = RowStore(layout, [files])
    files.fails = "writes"
    rows = make_rows(16)
    append(store, "a", rows)
    open_session(store, "b", rows)
    assert not store.flush("b")
    assert torch.equal(read_all(store, "b"), rows)
    files.fails = ""
    assert store.flush("b")
    store.close()


def test_pending_pages_of_another_session_are_not_durable_yet(
    layout: PageLayout, make_rows: MakeRows, blocked_tier: Any
) -> None:
    store = RowStore(layout, [RamTier(1 << 20), blocked_tier])
    blocked_tier.release.set()
    blocked_tier.failing = True
    rows = make_rows(16)
    append(store, "a", rows)
    assert not store.flush("a")
    store.close_session("a")
    open_session(store, "b", rows)
    assert not store.flush("b"), "they are in memory alone"
    assert torch.equal(read_all(store, "b"), rows)
    blocked_tier.failing = False
    assert store.flush("b")
    assert list_stored(store) == set(name_pages(rows, layout.page_tokens))
    store.close()


def test_a_page_that_one_session_lacks_is_there_once_another_one_has_written_it(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    store = open_store()
    rows = make_rows(24)
    open_session(store, "a", rows)
    assert store.missing_pages("a") == [0, 1, 2]
    append(store, "b", rows[:, :, :, :16])
    assert torch.equal(store.gather("a", torch.arange(16)), rows[:, :, :, :16])
    assert store.missing_pages("a") == [2]
    store.open("c", get_pages(store, "a")[2:])
    store.restore("c", 0, rows[:, :, :, 16:])
    assert torch.equal(read_all(store, "a"), rows)
    assert store.repair_pages("a") == []
    store.check()


def test_shared_pages_under_int8_have_the_same_rows_in_all_sessions(
    layout: PageLayout, make_rows: MakeRows, tmp_path: Path
) -> None:
    codecs = [Codec.RAW, Codec.INT8]
    store = RowStore(layout, [RamTier(1 << 20), NvmeTier(tmp_path / "rows")], codecs=codecs)
    rows = make_rows(29)
    more = make_rows(11, seed=1)
    store.open("b", write(store, "a", rows))
    assert torch.equal(read_all(store, "b"), read_all(store, "a")[:, :, :, :24])
    assert not torch.equal(read_all(store, "b"), rows[:, :, :, :24])
    append(store, "b", more)
    write(store, "c", torch.cat([rows[:, :, :, :24], more], 3))
    assert torch.equal(read_all(store, "b"), read_all(store, "c"))
    store.close()
