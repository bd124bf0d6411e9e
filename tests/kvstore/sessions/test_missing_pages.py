"""Damaged pages are reported as missing, and restored for all sessions that have them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvstore.errors import (
    CorruptPageError,
    MissingPageError,
    RowRangeError,
    RowShapeError,
    TierFailedError,
)
from kvstore.format.codec import Codec, encode_page
from kvstore.format.page import PageId, PageLayout
from kvstore.store import RowStore
from kvstore.tiers.base import Tier
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.tiers.ram import RamTier
from tests.kvstore.failing_files import FaultyTier
from tests.kvstore.stored_rows import (
    append,
    delete_from_lowest,
    get_pages,
    name_pages,
    open_session,
    read_all,
    write,
)

OpenStore = Callable[..., RowStore]
MakeRows = Callable[..., Tensor]


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
    """Factory `damaged(page, at)`: a flipped bit in a page of "a", 48 rows, of which "b" has 32 too."""

    def make(page: int, at: int) -> tuple[RowStore, Tensor]:
        store = open_store()
        rows = make_rows(48)
        ids = write(store, "a", rows)
        store.close()
        flip(tmp_path / "rows", layout, page, at)
        again = open_store()
        again.open("a", ids)
        again.open("b", ids[:4])
        return again, rows

    return make


@pytest.mark.parametrize("by", ["a", "b"])
def test_a_flipped_bit_in_the_rows_is_found_by_repair_pages(
    damaged: Callable[..., tuple[RowStore, Tensor]], by: str
) -> None:
    store, rows = damaged(2, 300)
    assert (store.missing_pages("a"), store.missing_pages("b")) == ([], [])
    assert (store.repair_pages("a"), store.repair_pages("b")) == ([2], [2])
    with pytest.raises(CorruptPageError, match="checksum does not match"):
        read_all(store, "b")
    store.restore(by, 2, rows[:, :, :, 16:24])
    assert (store.repair_pages("a"), store.repair_pages("b")) == ([], [])
    assert store.flush(by)
    assert torch.equal(read_all(store, "a"), rows)
    assert torch.equal(read_all(store, "b"), rows[:, :, :, :32])
    store.check()


@pytest.mark.parametrize("by", ["a", "b"])
def test_a_flipped_bit_in_a_header_makes_its_page_missing_until_it_is_restored(
    damaged: Callable[..., tuple[RowStore, Tensor]], open_store: OpenStore, by: str
) -> None:
    store, rows = damaged(2, 20)
    assert store.missing_pages(by) == [2]
    assert store.repair_pages(by) == [2]
    store.restore(by, 2, rows[:, :, :, 16:24])
    assert store.flush(by)
    assert (store.repair_pages("a"), store.repair_pages("b")) == ([], [])
    store.close()
    again = open_store()
    open_session(again, "a", rows)
    open_session(again, "b", rows[:, :, :, :32])
    assert (again.repair_pages("a"), again.repair_pages("b")) == ([], [])
    assert torch.equal(read_all(again, "b"), rows[:, :, :, :32])


@pytest.mark.parametrize("intact_checksum", [True, False])
def test_a_restored_page_replaces_the_damaged_copies_in_all_files(
    layout: PageLayout, make_rows: MakeRows, tmp_path: Path, intact_checksum: bool
) -> None:
    files = [NvmeTier(tmp_path / name, name=name) for name in ("upper", "lower")]
    store = RowStore(layout, files)
    rows = make_rows(24)
    ids = write(store, "a", rows)
    if intact_checksum:
        other = replace(layout, fingerprint="other")
        page = rows[:, :, :, 8:16].contiguous()
        for tier in files:
            tier.put([(ids[1], encode_page(other, ids[1], page, written_at=1))])
    else:
        for name in ("upper", "lower"):
            flip(tmp_path / name, layout, 1, 300)
    assert store.repair_pages("a") == [1]
    store.restore("a", 1, rows[:, :, :, 8:16])
    assert store.flush("a")
    copies = [tier.get(ids[1:2]) for tier in files]
    assert copies[0] == copies[1]
    assert torch.equal(read_all(store, "a"), rows)
    store.close()


def test_a_restored_page_that_the_lowest_tier_refuses_replaces_its_damaged_copy_later(
    layout: PageLayout, make_rows: MakeRows, tmp_path: Path, until: Callable[..., None]
) -> None:
    lowest = FaultyTier(tmp_path / "rows")
    store = RowStore(layout, [RamTier(layout.page_bytes), lowest])
    rows = make_rows(24)
    ids = write(store, "a", rows)
    foreign = encode_page(
        replace(layout, fingerprint="other"), ids[0], rows[:, :, :, :8].contiguous(), written_at=1
    )
    lowest.put([(ids[0], foreign)])  # nothing is wrong with its checksum
    assert store.repair_pages("a") == [0]
    lowest.fails = "writes"
    store.restore("a", 0, rows[:, :, :, :8])
    assert not store.flush("a")
    assert torch.equal(read_all(store, "a"), rows)
    lowest.fails = ""
    assert store.flush("a")
    until(lambda: store.count_pending() == (0, 0))
    store.close()
    again = RowStore(layout, [NvmeTier(tmp_path / "rows")])
    open_session(again, "a", rows)
    assert torch.equal(read_all(again, "a"), rows)
    again.close()


def test_pages_behind_a_missing_page_stay_readable(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    store = open_store()
    rows = make_rows(24)
    ids = write(store, "a", rows)
    delete_from_lowest(store, ids[1:2])
    store.close()
    again = open_store()
    again.open("a", ids)
    assert again.missing_pages("a") == [1]
    assert torch.equal(again.gather("a", torch.arange(16, 24)), rows[:, :, :, 16:24])
    with pytest.raises(MissingPageError):
        again.gather("a", torch.tensor([9]))
    with pytest.raises(MissingPageError):
        list(again.scan_keys("a"))
    again.check()


def test_a_session_whose_last_page_is_missing_can_be_appended_to(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    store = open_store()
    rows = make_rows(40)
    ids = write(store, "a", rows[:, :, :, :24])
    delete_from_lowest(store, ids[2:])
    store.close()
    again = open_store()
    again.open("a", ids)
    assert again.missing_pages("a") == [2]
    append(again, "a", rows[:, :, :, 24:])
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
    ids = write(store, "a", rows)
    store.close()
    store = RowStore(layout, [NvmeTier(tmp_path / "rows")])
    flip(tmp_path / "rows", layout, 2, 20)
    store.open("a", ids)
    assert store.repair_pages("a") == [2]
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
    append(store, "a", rows)
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
    append(store, "a", rows)
    before = read_all(store, "a")
    store.flush("a")
    nvme.delete(get_pages(store, "a")[:1])
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
    write(store, "a", make_rows(24))
    closed = NvmeTier.get

    def fail(self: NvmeTier, ids: list[PageId]) -> None:
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
    write(store, "a", rows)
    flip(tmp_path / "upper", layout, 1, 300)
    assert store.repair_pages("a") == []
    assert torch.equal(read_all(store, "a"), rows)
    store.close()


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("by", ["a", "b"])
def test_a_page_left_only_in_memory_is_written_again(
    layout: PageLayout, make_rows: MakeRows, tmp_path: Path, codec: Codec, by: str
) -> None:
    rows = make_rows(48)
    ids = name_pages(rows, layout.page_tokens)

    def open_both() -> RowStore:
        tiers: list[Tier] = [RamTier(12 * layout.page_bytes), NvmeTier(tmp_path / "rows")]
        store = RowStore(layout, tiers, codecs=[Codec.RAW, codec])
        for name, pages in (("a", 6), ("b", 4)):
            store.open(name, ids[:pages])
        return store

    store = RowStore(layout, [NvmeTier(tmp_path / "rows")], codecs=[codec])
    write(store, "a", rows)
    store.close()
    store = open_both()
    before = read_all(store, "a")
    segment = min((tmp_path / "rows").glob("segment-*.kv"))
    segment.write_bytes(bytes(byte ^ 1 for byte in segment.read_bytes()))
    assert store.repair_pages(by) == []
    assert store.flush(by)
    store.close()
    store = open_both()
    assert torch.equal(read_all(store, by), before[:, :, :, : store.length(by)])
    store.close()
