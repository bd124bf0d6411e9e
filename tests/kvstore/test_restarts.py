"""Flushed pages survive a restart; deleted and unfinished ones do not."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvstore.errors import ForeignPageError
from kvstore.format.page import PageLayout
from kvstore.store import RowStore
from tests.kvstore.stored_rows import append, list_stored, name_pages, open_session, read_all, write

OpenStore = Callable[..., RowStore]
MakeRows = Callable[..., Tensor]


def test_flushed_pages_survive_a_restart(
    open_store: OpenStore, make_rows: MakeRows, tmp_path: Path
) -> None:
    store = open_store()
    rows, others = make_rows(40), make_rows(8, seed=1)
    pages = {"a": write(store, "a", rows), "b": write(store, "b", others)}
    shutil.copytree(tmp_path / "rows", tmp_path / "copy")
    copy = open_store(directory=tmp_path / "copy")
    assert copy.sessions() == [], "which sessions there are is known to who opens them"
    for session, ids in pages.items():
        copy.open(session, ids)
        assert copy.missing_pages(session) == []
    assert torch.equal(read_all(copy, "a"), rows)
    assert torch.equal(read_all(copy, "b"), others)
    assert append(copy, "a", rows[:, :, :, :10]) == 50
    assert torch.equal(read_all(copy, "a"), torch.cat([rows, rows[:, :, :, :10]], 3))
    copy.check()


def test_rows_behind_the_last_full_page_do_not_survive_a_restart(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    store = open_store()
    rows = make_rows(43)
    pages = write(store, "a", rows)
    assert write(store, "b", rows[:, :, :, :5]) == []
    store.close()
    again = open_store()
    again.open("a", pages)
    assert again.length("a") == 40
    assert torch.equal(read_all(again, "a"), rows[:, :, :, :40])
    other = make_rows(9, seed=1)
    assert append(again, "a", other) == 49
    assert torch.equal(read_all(again, "a"), torch.cat([rows[:, :, :, :40], other], 3))
    again.check()


def test_after_a_restart_a_read_copies_pages_into_memory_only_if_it_is_to(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    store = open_store()
    rows = make_rows(16)
    pages = write(store, "a", rows)
    store.close()
    again = open_store()
    again.open("a", pages)
    run = [torch.arange(16).repeat(2, 1)] * 3
    for promote in (False, True):
        for layer, gathered in enumerate(again.gather_selection("a", run, promote=promote)):
            assert torch.equal(torch.stack(gathered), rows[layer])
        assert bool(again.usage()["ram"]) is promote


def test_a_session_has_exactly_the_pages_that_it_is_opened_with(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    store = open_store()
    rows, other = make_rows(64), make_rows(16, seed=9)
    pages = write(store, "a", rows)
    store.close()
    again = open_store()
    again.open("a", pages[:3])
    assert torch.equal(read_all(again, "a"), rows[:, :, :, :24])
    append(again, "a", other)
    expected = torch.cat([rows[:, :, :, :24], other], 3)
    assert torch.equal(read_all(again, "a"), expected)
    again.close()
    third = open_store()
    open_session(third, "a", expected)
    third.open("b", pages)
    third.open("c", [pages[0], pages[5]])
    assert torch.equal(read_all(third, "a"), expected)
    assert torch.equal(read_all(third, "b"), rows)
    gap = torch.cat([rows[:, :, :, :8], rows[:, :, :, 40:48]], 3)
    assert torch.equal(read_all(third, "c"), gap), "whatever they are"
    third.check()


def test_pages_that_no_tier_has_are_missing(open_store: OpenStore, make_rows: MakeRows) -> None:
    store = open_store()
    rows = make_rows(24)
    write(store, "a", rows[:, :, :, :16])
    store.close()
    again = open_store()
    open_session(again, "a", rows)
    assert again.missing_pages("a") == [2]
    again.restore("a", 2, rows[:, :, :, 16:])
    assert again.missing_pages("a") == []
    assert torch.equal(read_all(again, "a"), rows)
    assert again.flush("a")
    again.close()
    third = open_store()
    open_session(third, "a", rows)
    assert third.missing_pages("a") == []


def test_deleted_pages_can_be_written_again(open_store: OpenStore, make_rows: MakeRows) -> None:
    store = open_store()
    rows = make_rows(40)
    for _ in range(2):
        pages = write(store, "a", rows)
        store.close_session("a")
        assert len(store.delete(pages).result()) == 5
        assert store.contains(pages) == [False] * 5
    write(store, "a", rows[:, :, :, :24])
    store.close()
    again = open_store()
    open_session(again, "a", rows)
    assert again.missing_pages("a") == [3, 4], "deleted ones stay deleted"
    assert torch.equal(again.gather("a", torch.arange(24)), rows[:, :, :, :24])


def test_deleting_every_page_leaves_no_bytes(
    open_store: OpenStore, make_rows: MakeRows, tmp_path: Path
) -> None:
    store = open_store(segment_bytes=4000)
    pages = {
        session: write(store, session, make_rows(50, seed=seed))
        for seed, session in enumerate("abc")
    }
    assert len(list((tmp_path / "rows").glob("segment-*"))) > 3
    store.close()
    store = open_store(segment_bytes=4000)
    append(store, "d", make_rows(3))
    store.open("b", pages["b"])
    for ids in pages.values():
        store.delete(ids).result()
    assert list_stored(store) == set(pages["b"]), "those of an open session are left alone"
    store.close_session("b")
    store.close_session("d")
    for _ in range(2):
        store.delete(pages["b"]).result()
    assert store.usage() == {"ram": 0, "nvme": 0}
    assert len(list((tmp_path / "rows").glob("segment-*"))) == 1
    store.check()


def test_stored_pages_are_listed_by_when_they_were_written(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    store = open_store()
    expected = set(write(store, "a", make_rows(80)))
    assert store.list_pages() == expected
    assert store.list_pages(older_than_seconds=3600) == set()
    store.close()
    again = open_store()
    assert again.list_pages() == expected
    assert again.list_pages(older_than_seconds=3600) == set()


def test_tiers_of_another_model_are_refused(
    open_store: OpenStore, make_rows: MakeRows, layout: PageLayout
) -> None:
    store = open_store()
    pages = write(store, "a", make_rows(8))
    store.close()
    with pytest.raises(ForeignPageError, match="another model"):
        open_store(layout=replace(layout, fingerprint="model B"))
    assert open_store().contains(pages) == [True]


def test_a_damaged_first_page_is_no_page_of_another_model(
    open_store: OpenStore, make_rows: MakeRows, layout: PageLayout, tmp_path: Path
) -> None:
    store = open_store()
    rows = make_rows(16)
    write(store, "a", rows)
    store.close()
    (segment,) = (tmp_path / "rows").glob("segment-*.kv")
    store = open_store()
    store.close()
    raw = bytearray(segment.read_bytes())
    raw[20] ^= 1
    segment.write_bytes(raw)
    again = open_store()
    open_session(again, "a", rows)
    assert 0 in again.repair_pages("a")
    assert name_pages(rows, layout.page_tokens)[1] in list_stored(again)
