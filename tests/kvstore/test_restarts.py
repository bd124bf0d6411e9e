"""Flushed pages survive a restart; deleted, uncommitted and unfinished ones do not."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvstore.errors import ForeignPageError
from kvstore.format.codec import encode_page
from kvstore.format.page import PageKey, PageLayout
from kvstore.store import RowStore
from kvstore.tiers.ram import RamTier

OpenStore = Callable[..., RowStore]
MakeRows = Callable[..., Tensor]


def read_all(store: RowStore, session: str) -> Tensor:
    return store.gather(session, torch.arange(store.length(session)))


def test_flushed_pages_survive_a_restart(
    open_store: OpenStore, make_rows: MakeRows, layout: PageLayout, tmp_path: Path
) -> None:
    store = open_store()
    rows = make_rows(40)
    store.append("a", rows)
    store.append("b", rows[:, :, :, :8])
    store.flush("a")
    store.flush("b")
    shutil.copytree(tmp_path / "rows", tmp_path / "copy")
    copy = open_store(directory=tmp_path / "copy")
    assert (copy.sessions(), copy.length("a"), copy.length("b")) == (["a", "b"], 40, 8)
    assert torch.equal(read_all(copy, "a"), rows)
    assert copy.append("a", rows[:, :, :, :10]) == 50
    assert torch.equal(read_all(copy, "a"), torch.cat([rows, rows[:, :, :, :10]], 3))
    copy.check()


def test_rows_behind_the_last_full_page_do_not_survive_a_restart(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    store = open_store()
    rows = make_rows(43)
    store.append("a", rows)
    store.append("b", rows[:, :, :, :5])
    assert store.flush("a")
    assert store.flush("b")
    store.close()
    again = open_store()
    assert (again.sessions(), again.length("a"), again.length("b")) == (["a"], 40, 0)
    assert torch.equal(read_all(again, "a"), rows[:, :, :, :40])
    other = make_rows(9, seed=1)
    assert again.append("a", other) == 49
    assert torch.equal(read_all(again, "a"), torch.cat([rows[:, :, :, :40], other], 3))
    again.check()


def test_after_a_restart_a_read_copies_pages_into_memory_only_if_it_is_to(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    store = open_store()
    rows = make_rows(16)
    store.append("a", rows)
    store.close()
    again = open_store()
    run = [torch.arange(16).repeat(2, 1)] * 3
    for promote in (False, True):
        for layer, gathered in enumerate(again.gather_selection("a", run, promote=promote)):
            assert torch.equal(torch.stack(gathered), rows[layer])
        assert bool(again.usage()["ram"]) is promote


def test_uncommitted_rows_are_truncated_after_a_restart(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    store = open_store()
    rows = make_rows(64)
    store.append("a", rows[:, :, :, :24])
    store.flush("a")
    store.append("a", rows[:, :, :, 24:])
    store.close()
    again = open_store()
    other = make_rows(16, seed=9)
    assert again.length("a") == 64
    again.truncate("a", 24)
    again.append("a", other)
    expected = torch.cat([rows[:, :, :, :24], other], 3)
    assert torch.equal(read_all(again, "a"), expected)
    again.close()
    third = open_store()
    assert torch.equal(read_all(third, "a"), expected)
    third.check()


@pytest.mark.parametrize("length", [0, 8, 16, 24])
def test_a_truncated_length_survives_a_restart(
    open_store: OpenStore, make_rows: MakeRows, length: int
) -> None:
    store = open_store()
    rows = make_rows(24)
    store.append("a", rows)
    store.flush("a")
    store.truncate("a", length)
    store.flush("a")
    store.close()
    again = open_store()
    assert again.length("a") == length
    assert torch.equal(read_all(again, "a"), rows[:, :, :, :length])
    again.check()


def test_a_deleted_session_can_be_created_again(open_store: OpenStore, make_rows: MakeRows) -> None:
    store = open_store()
    store.append("a", make_rows(40))
    store.flush("a")
    store.delete("a")
    assert store.length("a") == 0
    rows = make_rows(24, seed=5)
    store.append("a", rows)
    store.close()
    again = open_store()
    assert torch.equal(read_all(again, "a"), rows)


def test_deleting_every_session_leaves_no_bytes(
    open_store: OpenStore, make_rows: MakeRows, tmp_path: Path
) -> None:
    store = open_store(segment_bytes=4000)
    for session in "abc":
        store.append(session, make_rows(50))
        store.flush(session)
    assert len(list((tmp_path / "rows").glob("segment-*"))) > 3
    store.close()
    store = open_store(segment_bytes=4000)
    store.append("d", make_rows(3))
    assert store.unclaimed() == ["a", "b", "c"]
    assert [store.delete_unclaimed(each) for each in ("a", "c", "never seen")] == [
        True,
        True,
        False,
    ]
    assert store.sessions() == ["b", "d"]
    store.delete("d")
    store.delete("b")
    store.delete("b")
    assert store.usage() == {"ram": 0, "nvme": 0}
    assert len(list((tmp_path / "rows").glob("segment-*"))) == 1
    store.check()


def test_an_unopened_session_has_the_rows_before_a_gap(
    layout: PageLayout, make_rows: MakeRows
) -> None:
    tier = RamTier(1 << 20)
    rows = make_rows(40)
    tier.put(
        [
            (
                key := PageKey("a", i),
                encode_page(layout, key, i + 1, rows[:, :, :, 8 * i : 8 * i + 8]),
            )
            for i in (0, 1, 3, 4)
        ]
    )
    tier.put([(PageKey("b", 2), encode_page(layout, PageKey("b", 2), 9, rows[:, :, :, :8]))])
    store = RowStore(layout, [tier])
    assert store.sessions() == ["a", "b"]
    assert (store.length("a"), store.length("b")) == (16, 0)
    assert torch.equal(read_all(store, "a"), rows[:, :, :, :16])
    store.check()
    store.close()


def test_tiers_of_another_model_are_refused(
    open_store: OpenStore, make_rows: MakeRows, layout: PageLayout
) -> None:
    store = open_store()
    store.append("a", make_rows(8))
    store.close()
    with pytest.raises(ForeignPageError, match="another model"):
        open_store(layout=replace(layout, fingerprint="model B"))
    again = open_store()
    assert again.length("a") == 8
