"""The offline check reports valid, damaged and dead records of a directory."""

import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvstore.errors import CorruptPageError, DirectoryLockedError
from kvstore.format.page import HEADER_BYTES, Blob, PageKey
from kvstore.fsck import check_directory, check_tier, locked_directory
from kvstore.store import RowStore
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.tiers.ram import RamTier

MakePage = Callable[..., tuple[PageKey, Blob]]
OpenStore = Callable[..., RowStore]
MakeRows = Callable[..., Tensor]


@pytest.fixture
def directory(tmp_path: Path, make_page: MakePage) -> Path:
    """A directory with pages 0..5 of a session, page 1 written twice, page 2 deleted."""
    size = len(make_page(0)[1])
    with closing(
        NvmeTier(tmp_path / "pages", segment_bytes=3 * size, compact_in_background=False)
    ) as tier:
        for index in range(6):
            tier.put([make_page(index)])
        tier.put([make_page(1, sequence=2)])
        tier.delete([PageKey("s", 2)])
        tier.flush()
    return tmp_path / "pages"


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def test_the_report_has_the_pages_that_a_tier_finds(directory: Path) -> None:
    report = check_directory(directory)
    with closing(NvmeTier(directory)) as tier:
        assert {header.key: header for header in tier.stored()} == {
            key: page.header for key, page in report.pages.items()
        }
        assert tier.used_bytes == report.bytes
    assert not [page for page in report.pages.values() if page.damage]
    assert sum(each.pages for each in report.segments) == 5
    assert all(each.live_bytes + each.dead_bytes == each.file_bytes for each in report.segments)
    assert sum(each.dead_bytes for each in report.segments) > 2 * HEADER_BYTES


def test_every_payload_is_verified_and_dead_records_are_reported_separately(
    directory: Path, make_page: MakePage
) -> None:
    size = len(make_page(0)[1])
    oldest = min(directory.glob("segment-*.kv"))
    flip(oldest, HEADER_BYTES + 7)  # page 0
    flip(oldest, size + HEADER_BYTES + 7)  # the version of page 1 that no longer counts
    report = check_directory(directory)
    assert {key.index: page.damage for key, page in report.pages.items() if page.damage} == {
        0: "its checksum does not match"
    }
    assert report.segments[0].corrupt == 1


def test_an_unreadable_header_makes_the_same_pages_suspect_as_in_the_tier(
    directory: Path,
) -> None:
    flip(sorted(directory.glob("segment-*.kv"))[1], 4)
    report = check_directory(directory)
    suspect = {key for key, page in report.pages.items() if page.damage}
    assert sum(each.damaged for each in report.segments) == 1
    with closing(NvmeTier(directory)) as tier:
        for key in report.pages:
            if key in suspect:
                with pytest.raises(CorruptPageError):
                    tier.get([key])
            else:
                assert tier.get([key])[0] is not None
    assert suspect


def test_a_torn_tail_is_not_part_of_the_pages(directory: Path, make_page: MakePage) -> None:
    newest = max(directory.glob("segment-*.kv"))
    with newest.open("ab") as file:
        file.write(bytes(make_page(9)[1])[:-1])
    report = check_directory(directory)
    assert report.segments[-1].torn_bytes == len(make_page(9)[1]) - 1
    assert PageKey("s", 9) not in report.pages


def test_a_directory_cannot_be_checked_and_used_at_once(directory: Path) -> None:
    with (
        closing(NvmeTier(directory)),
        pytest.raises(DirectoryLockedError),
        locked_directory(directory),
    ):
        pass
    with locked_directory(directory), pytest.raises(DirectoryLockedError):
        NvmeTier(directory)
    before = sorted(os.listdir(directory))
    (directory / "lock").unlink()
    with locked_directory(directory):
        assert check_directory(directory).pages
    assert sorted(os.listdir(directory)) == [name for name in before if name != "lock"]


def test_a_tier_check_reports_unreadable_pages(directory: Path, make_page: MakePage) -> None:
    flip(min(directory.glob("segment-*.kv")), HEADER_BYTES + 7)
    with closing(NvmeTier(directory)) as tier:
        report = check_tier(tier)
    assert [key.index for key, page in sorted(report.pages.items()) if page.damage] == [0]
    assert report.accounting_error == ""
    with closing(RamTier(1 << 20)) as ram:
        ram.put([make_page(0)])
        assert list(check_tier(ram).pages) == [PageKey("s", 0)]


def test_restored_pages_have_the_epoch_of_the_session(
    open_store: OpenStore, make_rows: MakeRows, tmp_path: Path
) -> None:
    rows = make_rows(24)
    store = open_store()
    store.open("a", epoch=4, length=24)
    assert store.repair_pages("a") == [0, 1, 2]
    for index in range(3):
        store.restore("a", index, rows[:, :, :, 8 * index : 8 * (index + 1)])
    assert store.flush("a")
    assert torch.equal(store.gather("a", torch.arange(24)), rows)
    store.close()
    assert {page.header.epoch for page in check_directory(tmp_path / "rows").pages.values()} == {4}
