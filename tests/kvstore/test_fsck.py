"""The offline check reports valid, damaged and dead records of a directory."""

import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from kvstore.errors import DirectoryLockedError
from kvstore.format.page import HEADER_BYTES, PageId
from kvstore.fsck import check_directory, check_tier, locked_directory
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.tiers.ram import RamTier
from tests.kvstore.page_ids import make_id

MakePage = Callable[..., tuple[PageId, bytes]]


@pytest.fixture
def directory(tmp_path: Path, make_page: MakePage) -> Path:
    """A directory with pages 0..5 of a session in files of three, page 1 put again, page 2 deleted."""
    size = len(make_page(0)[1])
    with closing(
        NvmeTier(tmp_path / "pages", segment_bytes=3 * size, compact_in_background=False)
    ) as tier:
        tier.put([make_page(index) for index in range(6)])
        tier.delete([make_id(1), make_id(2)])
        tier.put([make_page(1)])
        tier.flush()
    return tmp_path / "pages"


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def test_the_report_has_the_pages_that_a_tier_finds(directory: Path) -> None:
    report = check_directory(directory)
    with closing(NvmeTier(directory)) as tier:
        assert {header.id: header for header in tier.stored()} == {
            page_id: page.header for page_id, page in report.pages.items()
        }
        assert tier.used_bytes == report.bytes
    assert report.pages.keys() == {make_id(index) for index in (0, 1, 3, 4, 5)}
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
    flip(oldest, size + HEADER_BYTES + 7)  # the copy of page 1 that was deleted
    report = check_directory(directory)
    assert {page_id: page.damage for page_id, page in report.pages.items() if page.damage} == {
        make_id(0): "its checksum does not match"
    }
    assert report.segments[0].corrupt == 1


def test_a_page_with_an_unreadable_header_is_not_there_and_all_others_are(directory: Path) -> None:
    before = check_directory(directory)
    flip(sorted(directory.glob("segment-*.kv"))[1], 4)  # page 3
    report = check_directory(directory)
    assert sum(each.damaged for each in report.segments) == 1
    assert report.pages == {
        page_id: page for page_id, page in before.pages.items() if page_id != make_id(3)
    }


def test_a_torn_tail_is_not_part_of_the_pages(directory: Path, make_page: MakePage) -> None:
    newest = max(directory.glob("segment-*.kv"))
    with newest.open("ab") as file:
        file.write(bytes(make_page(9)[1])[:-1])
    report = check_directory(directory)
    assert report.segments[-1].torn_bytes == len(make_page(9)[1]) - 1
    assert make_id(9) not in report.pages


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
    assert [page_id for page_id, page in report.pages.items() if page.damage] == [make_id(0)]
    assert report.accounting_error == ""
    with closing(RamTier(1 << 20)) as ram:
        ram.put([make_page(0)])
        assert list(check_tier(ram).pages) == [make_id(0)]
