"""Deletion takes pages that no open session has, from every tier, sooner or later."""

from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch
from torch import Tensor

from kvstore.errors import TierFailedError
from kvstore.format.page import PageLayout
from kvstore.store import RowStore
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.tiers.ram import RamTier
from tests.kvstore.failing_files import FaultyTier
from tests.kvstore.stored_rows import append, list_stored, name_pages, open_session, read_all, write

OpenStore = Callable[..., RowStore]
MakeRows = Callable[..., Tensor]
Until = Callable[..., None]


def settle(store: RowStore, until: Until) -> None:
    """Wait until the background has retried everything."""
    writer, placement = store._through.writer, store._stack.placement
    until(lambda: not writer.has_refused() and not placement.has_pending())
    store.check()  # which waits for a retry that runs


def test_only_pages_that_no_open_session_has_are_deleted(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    store = open_store()
    rows = make_rows(32)
    ids = write(store, "a", rows)
    store.open("b", ids[:2])
    store.close_session("a")
    assert len(store.delete([*ids, bytes(16)]).result()) == 2
    assert store.contains(ids) == [True, True, False, False]
    assert torch.equal(read_all(store, "b"), rows[:, :, :, :16])
    store.close_session("b")
    assert len(store.delete(ids).result()) == 2
    assert set(store.usage().values()) == {0}
    store.close()
    again = open_store()
    assert again.contains(ids) == [False] * 4
    again.check()


def test_a_closed_session_can_be_reopened(open_store: OpenStore, make_rows: MakeRows) -> None:
    store = open_store()
    rows = make_rows(29)
    append(store, "a", rows)
    for forget in (store.close_session, store.release):
        forget("a")
        assert (store.sessions(), store.length("a")) == ([], 0)
        forget("a")
        open_session(store, "a", rows)
        assert torch.equal(read_all(store, "a"), rows[:, :, :, :24])
    store.check()


@pytest.mark.parametrize("failing", ["upper", "lower", "both"])
def test_a_refused_deletion_is_retried_in_every_tier(
    layout: PageLayout, make_rows: MakeRows, tmp_path: Path, until: Until, failing: str
) -> None:
    files = {name: FaultyTier(tmp_path / name, name=name) for name in ("upper", "lower")}
    store = RowStore(layout, [RamTier(1 << 20), *files.values()])
    ids = write(store, "a", make_rows(24))
    store.close_session("a")
    for name, tier in files.items():
        tier.fails = "all" if failing in (name, "both") else ""
    store.delete(ids).result()
    assert store._through.writer.has_refused()
    for tier in files.values():
        tier.fails = ""
    settle(store, until)
    assert [list_stored(store, depth) for depth in range(3)] == [set()] * 3
    store.check()
    store.close()


@pytest.mark.parametrize("failing", ["upper", "lower", "both"])
@pytest.mark.parametrize(("waited", "flushed"), [(True, True), (True, False), (False, True)])
def test_pages_that_are_deleted_and_written_again_at_once_are_there(
    layout: PageLayout,
    make_rows: MakeRows,
    tmp_path: Path,
    failing: str,
    waited: bool,
    flushed: bool,
    until: Until,
) -> None:
    files = {name: FaultyTier(tmp_path / name, name=name) for name in ("upper", "lower")}
    store = RowStore(layout, [RamTier(1 << 20), *files.values()])
    rows = make_rows(24)
    ids = write(store, "a", rows)
    store.close_session("a")
    for name, tier in files.items():
        tier.fails = "writes" if failing in (name, "both") else ""
    deletion = store.delete(ids)
    if waited:
        deletion.result()
    append(store, "b", rows)
    if flushed:
        store.flush("b")
    assert torch.equal(read_all(store, "b"), rows)
    store.close_session("b")  # which has them no more, but nobody has asked to delete them since
    for tier in files.values():
        tier.fails = ""
    settle(store, until)
    assert store.contains(ids) == [True] * 3
    store.close()
    again = RowStore(layout, [NvmeTier(tmp_path / "lower")])
    open_session(again, "b", rows)
    assert torch.equal(read_all(again, "b"), rows)
    again.close()


def test_a_retried_deletion_leaves_the_pages_of_sessions_that_were_opened_since(
    layout: PageLayout, make_rows: MakeRows, tmp_path: Path, until: Until
) -> None:
    lowest = FaultyTier(tmp_path / "rows")
    store = RowStore(layout, [RamTier(1 << 20), lowest])
    rows = make_rows(24)
    ids = write(store, "a", rows)
    store.close_session("a")
    lowest.fails = "writes"
    store.delete(ids).result()
    store.open("b", ids[:2])
    lowest.fails = ""
    settle(store, until)
    assert list_stored(store) == set(ids[:2])
    assert torch.equal(read_all(store, "b"), rows[:, :, :, :16])
    store.close()


def test_a_session_that_is_opened_during_a_deletion_knows_what_is_left(
    layout: PageLayout, make_rows: MakeRows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RowStore(layout, [NvmeTier(tmp_path / "rows")])
    rows = make_rows(24)
    ids = write(store, "a", rows)
    store.close_session("a")
    began, may_go_on = Event(), Event()
    delete = NvmeTier.delete

    def delete_slowly(self: NvmeTier, *arguments: Any) -> None:
        began.set()
        may_go_on.wait()
        delete(self, *arguments)

    monkeypatch.setattr(NvmeTier, "delete", delete_slowly)
    deletion = store.delete(ids[1:2])
    began.wait()
    opened = Thread(target=lambda: open_session(store, "b", rows))
    opened.start()
    store.open("other", ids[:1])
    opened.join(0.2)
    assert opened.is_alive(), "it waits, but not those that have other pages"
    may_go_on.set()
    opened.join()
    deletion.result()
    assert store.missing_pages("b") == [1]
    store.restore("b", 1, rows[:, :, :, 8:16])
    assert torch.equal(read_all(store, "b"), rows)
    store.check()
    store.close()


def test_threads_that_open_and_delete_the_same_pages_read_right_rows_or_miss_them(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    store = open_store(ram_pages=4, segment_bytes=20_000)
    rows = make_rows(24)
    ids = name_pages(rows, 8)
    failures: list[BaseException] = []

    def use(session: str) -> None:
        try:
            for _ in range(150):
                store.open(session, ids)
                for index in store.missing_pages(session):
                    store.restore(session, index, rows[:, :, :, 8 * index : 8 * index + 8])
                assert torch.equal(read_all(store, session), rows)
                assert store.flush(session)
                store.close_session(session)
                store.delete(ids)
        except BaseException as error:
            failures.append(error)

    threads = [Thread(target=use, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    store.delete(ids).result()
    assert set(store.usage().values()) == {0}
    store.check()


def test_pages_that_no_tier_accepts_are_not_written_after_their_deletion(
    layout: PageLayout, make_rows: MakeRows, blocked_tier: Any, until: Until
) -> None:
    blocked_tier.release.set()
    store = RowStore(layout, [blocked_tier])
    rows = make_rows(layout.page_tokens)
    ids = name_pages(rows, layout.page_tokens)
    store.open("a", ids)
    assert store.missing_pages("a") == [0]
    blocked_tier.failing = True
    store.restore("a", 0, rows)
    assert not store.flush("a")
    store.close_session("a")
    store.delete(ids)
    blocked_tier.failing = False
    settle(store, until)
    assert list(blocked_tier.stored()) == []
    store.close()


def test_a_deletion_needs_no_answer_of_the_lowest_tier(
    layout: PageLayout, make_rows: MakeRows, tmp_path: Path, until: Until
) -> None:
    lowest = FaultyTier(tmp_path / "rows")
    store = RowStore(layout, [RamTier(1 << 20), lowest])
    ids = write(store, "a", make_rows(24))
    store.close_session("a")
    lowest.fails = "all"
    assert len(store.delete(ids).result()) == 0, "as far as it is known"
    with pytest.raises(TierFailedError):
        store.contains(ids)
    lowest.fails = ""
    settle(store, until)
    assert store.contains(ids) == [False] * 3
    store.close()


def test_pages_that_memory_has_alone_are_deleted_with_those_that_wait_for_a_tier(
    layout: PageLayout, make_rows: MakeRows, tmp_path: Path, until: Until
) -> None:
    lowest = FaultyTier(tmp_path / "rows")
    store = RowStore(layout, [RamTier(1 << 20), lowest])
    rows = make_rows(24)
    lowest.fails = "all"
    append(store, "a", rows)
    assert not store.flush("a")
    assert store.count_pending() == (3, 3)
    store.close_session("a")
    store.delete(name_pages(rows, layout.page_tokens)).result()
    assert store.count_pending() == (0, 0)
    lowest.fails = ""
    settle(store, until)
    assert set(store.usage().values()) == {0}
    store.close()


def test_a_failed_opening_changes_nothing(
    layout: PageLayout, make_rows: MakeRows, tmp_path: Path
) -> None:
    lowest = FaultyTier(tmp_path / "rows")
    store = RowStore(layout, [RamTier(1 << 20), lowest])
    rows, others = make_rows(24), make_rows(16, seed=1)
    ids = write(store, "a", rows)
    other_ids = write(store, "b", others)
    for session in "ab":
        store.close_session(session)
    store.open("a", ids)
    lowest.fails = "all"
    with pytest.raises(TierFailedError):
        store.open("c", other_ids)
    with pytest.raises(TierFailedError):
        store.open("a", other_ids)
    assert store.sessions() == ["a"]
    store.open("a", ids[:2])
    lowest.fails = ""
    assert torch.equal(read_all(store, "a"), rows[:, :, :, :16])
    assert len(store.delete(other_ids).result()) == 2, "nobody holds them"
    store.close()
