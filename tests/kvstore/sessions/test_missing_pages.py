"""Damaged pages are reported as missing, and restored for all sessions that share them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvstore.errors import CorruptPageError, RowRangeError, RowShapeError, TierFailedError
from kvstore.format.codec import Codec
from kvstore.format.commit_history import ALL_COMMITTED
from kvstore.format.page import PageKey, PageLayout
from kvstore.format.page_table import SharedPages
from kvstore.store import RowStore
from kvstore.tiers.base import Tier
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.tiers.ram import RamTier

OpenStore = Callable[..., RowStore]
MakeRows = Callable[..., Tensor]


def read_all(store: RowStore, session: str) -> Tensor:
    return store.gather(session, torch.arange(store.length(session)))


def flip(directory: Path, layout: PageLayout, page: int, at: int) -> None:
    """Flip a bit of the `page`-th record of the first file."""
    segment = min(directory.glob("segment-*.kv"))
    raw = bytearray(segment.read_bytes())
    raw[page * layout.page_bytes + at] ^= 1
    segment.write_bytes(raw)


@pytest.fixture
def damaged(
    open_store: OpenStore, make_rows: MakeRows, layout: PageLayout, tmp_path: Path
) -> Callable[[int, int], tuple[RowStore, Tensor]]:
    """Factory `damaged(page, at)`: a flipped bit in session "a" of 48 rows, and its fork "b"."""

    def make(page: int, at: int) -> tuple[RowStore, Tensor]:
        store = open_store()
        rows = make_rows(48)
        store.append("a", rows)
        store.flush("a")
        store.close()
        flip(tmp_path / "rows", layout, page, at)
        again = open_store()
        again.open("a", epoch=1, length=48)
        again.open("b", epoch=1, length=32, shared=[SharedPages("a", 4)])
        return again, rows

    return make


def test_a_flipped_bit_in_the_rows_is_found_by_repair_pages(
    damaged: Callable[..., tuple[RowStore, Tensor]],
) -> None:
    store, rows = damaged(2, 300)
    assert (store.missing_pages("a"), store.missing_pages("b")) == ([], [])
    assert (store.repair_pages("a"), store.repair_pages("b")) == ([2], [2])
    with pytest.raises(CorruptPageError, match="page 2"):
        read_all(store, "b")
    store.restore("a", 2, rows[:, :, :, 16:24])
    assert (store.repair_pages("a"), store.repair_pages("b")) == ([], [])
    assert store.flush("a")
    assert torch.equal(read_all(store, "b"), rows[:, :, :, :32])
    store.check()


@pytest.mark.parametrize("by", ["a", "b"])
def test_a_flipped_bit_in_a_header_makes_pages_missing_until_restored(
    damaged: Callable[..., tuple[RowStore, Tensor]], open_store: OpenStore, by: str
) -> None:
    store, rows = damaged(2, 20)
    assert store.missing_pages(by) == [2]
    missing = store.repair_pages(by)
    assert 2 in missing, "and earlier ones in the file, which it may have superseded"
    for index in missing:
        store.restore(by, index, rows[:, :, :, 8 * index : 8 * index + 8])
    assert store.flush(by)
    assert store.repair_pages(by) == []
    store.close()
    again = open_store()
    again.open("a", epoch=2, length=48, history=ALL_COMMITTED)
    again.open("b", epoch=2, length=32, shared=[SharedPages("a", 4)])
    assert [index for index in again.repair_pages("a") if index < 4] == []
    assert torch.equal(read_all(again, "b"), rows[:, :, :, :32])


def test_a_session_whose_last_page_is_missing_can_be_appended_to(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    store = open_store()
    rows = make_rows(40)
    store.append("a", rows[:, :, :, :24])
    store.flush("a")
    store._stack.tiers.lowest.delete([PageKey("a", 2)])
    store.close()
    again = open_store()
    again.open("a", epoch=1, length=24)
    assert again.missing_pages("a") == [2]
    again.append("a", rows[:, :, :, 24:])
    assert again.flush("a"), "a missing page need not be durable"
    assert again.missing_pages("a") == [2]
    again.restore("a", 2, rows[:, :, :, 16:24])
    assert again.flush("a")
    assert torch.equal(read_all(again, "a"), rows)
    again.check()


def test_a_header_that_breaks_under_an_open_store_affects_only_its_page(
    make_rows: MakeRows, layout: PageLayout, tmp_path: Path
) -> None:
    store = RowStore(layout, [NvmeTier(tmp_path / "rows")])
    rows = make_rows(48)
    store.append("a", rows)
    store.close()
    store = RowStore(layout, [NvmeTier(tmp_path / "rows")])
    flip(tmp_path / "rows", layout, 2, 20)
    store.open("a", epoch=1, length=48)
    assert store.missing_pages("a") == [2]
    store.restore("a", 2, rows[:, :, :, 16:24])
    assert store.flush("a")
    assert torch.equal(read_all(store, "a"), rows)
    store.check()
    store.close()


def test_only_whole_pages_of_the_session_can_be_restored(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    store = open_store()
    rows = make_rows(20)
    store.append("a", rows)
    for tokens in (3, 16):
        with pytest.raises(RowShapeError):
            store.restore("a", 1, rows[:, :, :, :tokens])
    with pytest.raises(RowShapeError):
        store.restore("a", 1, rows[:, :, :, :8].half())
    for tokens in (4, 8):
        with pytest.raises(RowRangeError):
            store.restore("a", 2, rows[:, :, :, :tokens])
    for index in (3, -1):
        with pytest.raises(RowRangeError):
            store.restore("a", index, rows[:, :, :, :8])
    assert store.repair_pages("a") == [], "the rows behind the last page are no page to repair"
    assert torch.equal(read_all(store, "a"), rows)
    store.check()


def test_restored_rows_are_quantised_as_before(
    layout: PageLayout, make_rows: MakeRows, tmp_path: Path
) -> None:
    nvme = NvmeTier(tmp_path / "rows")
    store = RowStore(layout, [nvme], codecs=[Codec.INT8])
    rows = make_rows(16)
    store.append("a", rows)
    before = read_all(store, "a")
    store.flush("a")
    nvme.delete([PageKey("a", 0)])
    assert store.repair_pages("a") == [0]
    store.restore("a", 0, rows[:, :, :, :8])
    assert torch.equal(read_all(store, "a"), before)
    store.flush("a")
    assert torch.equal(read_all(store, "a"), before)
    store.close()


def test_pages_of_an_unresponsive_tier_are_not_missing(
    layout: PageLayout, make_rows: MakeRows, tmp_path: Path
) -> None:
    nvme = NvmeTier(tmp_path / "rows")
    store = RowStore(layout, [RamTier(layout.page_bytes), nvme])
    store.append("a", make_rows(24))
    store.flush("a")
    closed = NvmeTier.get

    def fail(self: NvmeTier, keys: list[PageKey]) -> None:
        raise TierFailedError("the device does not answer")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NvmeTier, "get", fail)
        with pytest.raises(TierFailedError):
            store.repair_pages("a")
    assert NvmeTier.get is closed
    assert store.repair_pages("a") == []
    store.close()


def test_a_damaged_copy_above_is_read_from_below(
    layout: PageLayout, make_rows: MakeRows, tmp_path: Path
) -> None:
    upper = NvmeTier(tmp_path / "upper", name="upper")
    store = RowStore(layout, [upper, NvmeTier(tmp_path / "lower", name="lower")])
    rows = make_rows(24)
    store.append("a", rows)
    store.flush("a")
    flip(tmp_path / "upper", layout, 1, 300)
    assert store.repair_pages("a") == []
    assert torch.equal(read_all(store, "a"), rows)
    store.close()


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("by", ["a", "b"])
def test_a_page_left_only_in_memory_is_written_again(
    layout: PageLayout, make_rows: MakeRows, tmp_path: Path, codec: Codec, by: str
) -> None:
    def opened(epoch: int) -> RowStore:
        tiers: list[Tier] = [RamTier(12 * layout.page_bytes), NvmeTier(tmp_path / "rows")]
        store = RowStore(layout, tiers, codecs=[Codec.RAW, codec])
        for name, length, shared in (("a", 48, []), ("b", 32, [SharedPages("a", 4)])):
            store.open(name, epoch=epoch, length=length, shared=shared, history=ALL_COMMITTED)
        return store

    store = RowStore(layout, [NvmeTier(tmp_path / "rows")], codecs=[codec])
    rows = make_rows(48)
    store.append("a", rows)
    store.close()
    store = opened(1)
    before = read_all(store, "a")
    segment = min((tmp_path / "rows").glob("segment-*.kv"))
    segment.write_bytes(bytes(byte ^ 1 for byte in segment.read_bytes()))
    assert store.repair_pages(by) == []
    assert store.flush(by)
    store.close()
    store = opened(2)
    assert torch.equal(read_all(store, by), before[:, :, :, : store.length(by)])
    store.close()
