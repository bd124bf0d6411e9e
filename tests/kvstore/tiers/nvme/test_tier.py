"""The NVMe tier survives restarts and torn writes, refuses corrupt pages and frees its disk."""

import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import google_crc32c
import pytest

from kvstore.errors import (
    CorruptPageError,
    DirectoryLockedError,
    PageVersionError,
    TierFailedError,
    TierFullError,
)
from kvstore.format.page import HEADER_BYTES, PageId, PageLayout
from kvstore.tiers.nvme.tier import NvmeTier
from tests.kvstore.page_ids import make_id, make_ids

MakePage = Callable[..., tuple[PageId, bytes]]


@pytest.fixture
def open_tier(layout: PageLayout, tmp_path: Path) -> Callable[[], NvmeTier]:
    """Factory `open_tier()`: segments of three pages, without background compaction."""
    return lambda: NvmeTier(
        tmp_path / "rows", segment_bytes=3 * layout.page_bytes, compact_in_background=False
    )


def segments(directory: Path) -> list[Path]:
    return sorted((directory / "rows").glob("segment-*.kv"))


def flip(path: Path, offset: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 0x10
    path.write_bytes(raw)


def test_pages_survive_a_restart(open_tier: Callable[[], NvmeTier], make_page: MakePage) -> None:
    tier = open_tier()
    pages = [make_page(number, written_at=number) for number in range(10)]
    tier.put(pages)
    tier.flush()
    tier.close()
    again = open_tier()
    assert again.get([page_id for page_id, _ in pages]) == [blob for _, blob in pages]
    assert again.used_bytes == sum(len(blob) for _, blob in pages)
    assert sorted(again.list_ids(4)) == sorted(make_ids(range(4)))
    again.check()
    again.close()


@pytest.mark.parametrize("between", [0, 1, 2, 5])
def test_deletions_and_pages_that_were_put_again_survive_a_restart_in_their_order(
    open_tier: Callable[[], NvmeTier], make_page: MakePage, between: int
) -> None:
    """Whatever lies between: in one segment or in several."""
    tier = open_tier()
    tier.put([make_page(0), make_page(1)])
    tier.put([make_page(10 + number) for number in range(between)])
    tier.delete(make_ids(range(2)))
    tier.put([make_page(20 + number) for number in range(between)])
    tier.put([make_page(0)])
    tier.delete([make_id(0)])
    tier.put([make_page(30 + number) for number in range(between)])
    tier.put([make_page(0)])
    tier.close()
    again = open_tier()
    assert again.contains(make_ids(range(2))) == [True, False]
    assert again.get([make_id(0)]) == [make_page(0)[1]]
    again.check()
    again.close()


def test_a_page_that_is_put_again_is_there_once(
    open_tier: Callable[[], NvmeTier], make_page: MakePage
) -> None:
    tier = open_tier()
    again = make_page(1, written_at=2)
    tier.put([make_page(0), make_page(1), again])
    assert tier.used_bytes == 2 * len(again[1])
    tier.check()
    tier.close()
    restarted = open_tier()
    assert restarted.get([again[0]]) == [again[1]]
    assert restarted.used_bytes == 2 * len(again[1])
    restarted.close()


def test_dead_segments_are_unlinked(
    open_tier: Callable[[], NvmeTier], make_page: MakePage, tmp_path: Path
) -> None:
    tier = open_tier()
    tier.put([make_page(number) for number in range(9)])
    assert len(segments(tmp_path)) == 3
    tier.delete(make_ids(range(3, 6)))
    tier.flush()
    assert [path.name for path in segments(tmp_path)][:2] == [
        "segment-00000001.kv",
        "segment-00000003.kv",
    ]
    tier.delete(make_ids(range(9)))
    tier.flush()
    assert len(segments(tmp_path)) == 1
    assert (tier.used_bytes, tier.file_bytes) == (0, 0)
    tier.close()


def test_tombstones_are_removed_with_the_last_segment_that_needed_them(
    open_tier: Callable[[], NvmeTier], make_page: MakePage, tmp_path: Path
) -> None:
    tier = open_tier()
    tier.put([make_page(number) for number in range(5)])
    first, newest = segments(tmp_path)
    tier.delete(make_ids(range(3, 5)))
    tier.flush()
    tier.delete(make_ids(range(3)))
    tier.flush()
    assert not first.exists()
    assert not newest.exists()
    assert tier.file_bytes == 0
    tier.check()
    tier.close()


def test_a_dead_segment_stays_until_its_tombstones_are_on_the_disk(
    open_tier: Callable[[], NvmeTier], make_page: MakePage, tmp_path: Path
) -> None:
    tier = open_tier()
    tier.put([make_page(number) for number in range(3)])
    tier.flush()
    tier.delete(make_ids(range(3)))
    assert segments(tmp_path)[0].name == "segment-00000001.kv"
    tier.flush()
    assert segments(tmp_path)[0].name != "segment-00000001.kv"
    tier.close()


def test_a_tombstone_outlives_every_older_copy_of_its_page(
    open_tier: Callable[[], NvmeTier], make_page: MakePage, tmp_path: Path
) -> None:
    tier = open_tier()
    tier.put([make_page(0), make_page(1), make_page(2)])  # Segment 1: page 1 alone stays.
    tier.delete([make_id(0)])
    tier.put([make_page(0), make_page(3), make_page(4)])
    tier.delete(make_ids(range(2, 5)))
    tier.delete([make_id(0)])
    tier.put([make_page(number) for number in range(5, 11)])  # The tombstone's segment is full now.
    tier.delete(make_ids(range(5, 11)))
    tier.close()
    assert segments(tmp_path)[0].name == "segment-00000001.kv"
    again = open_tier()
    assert [header.id for header in again.stored()] == [make_id(1)]
    again.close()


@pytest.mark.parametrize("lost_bytes", [1, 100, 400])
def test_a_torn_tail_is_truncated_and_overwritten(
    open_tier: Callable[[], NvmeTier], make_page: MakePage, tmp_path: Path, lost_bytes: int
) -> None:
    tier = open_tier()
    tier.put([make_page(0)])
    tier.flush()
    tier.put([make_page(1)])
    tier.close()
    torn = segments(tmp_path)[0]
    torn.write_bytes(torn.read_bytes()[:-lost_bytes])
    again = open_tier()
    assert again.get(make_ids(range(2))) == [make_page(0)[1], None]
    again.put([make_page(1)])
    again.flush()
    again.close()
    third = open_tier()
    assert third.get(make_ids(range(2))) == [make_page(0)[1], make_page(1)[1]]
    third.close()


def test_a_torn_unsynced_page_is_not_there(
    open_tier: Callable[[], NvmeTier], make_page: MakePage, tmp_path: Path
) -> None:
    tier = open_tier()
    tier.put([make_page(0)])
    tier.flush()
    tier.put([make_page(1)])
    end = tier.file_bytes
    tier.close()
    flip(segments(tmp_path)[0], end - 10)
    again = open_tier()
    assert again.get(make_ids(range(2))) == [make_page(0)[1], None]
    again.close()


@pytest.mark.parametrize("open_again", [False, True])
@pytest.mark.parametrize("at", [5, 30, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 5])
def test_a_flipped_bit_is_refused_and_other_pages_are_read(
    open_tier: Callable[[], NvmeTier],
    make_page: MakePage,
    tmp_path: Path,
    at: int,
    open_again: bool,
) -> None:
    tier = open_tier()
    pages = [make_page(number) for number in range(3)]
    tier.put(pages)
    tier.flush()
    flip(segments(tmp_path)[0], len(pages[0][1]) + at)
    if open_again:
        tier.close()
        tier = open_tier()
    if open_again and at < HEADER_BYTES:  # The header was read, and the page left out.
        assert tier.get([make_id(1)]) == [None]
    else:
        for _ in range(2):
            with pytest.raises(CorruptPageError, match=f"page {make_id(1).hex()}"):
                tier.get([make_id(1)])
    assert tier.contains(make_ids(range(3))) == [True, False, True]
    assert tier.get([make_id(0), make_id(2)]) == [pages[0][1], pages[2][1]]
    tier.check()
    tier.close()


@pytest.mark.parametrize("open_again", [False, True])
def test_a_damaged_page_is_replaced_by_the_next_put(
    open_tier: Callable[[], NvmeTier], make_page: MakePage, tmp_path: Path, open_again: bool
) -> None:
    tier = open_tier()
    pages = [make_page(number) for number in range(3)]
    tier.put(pages)
    flip(segments(tmp_path)[0], HEADER_BYTES + 5)
    with pytest.raises(CorruptPageError):
        tier.get([make_id(0)])
    tier.put(pages)
    assert tier.contains(make_ids(range(3))) == [True] * 3
    tier.flush()
    if open_again:
        tier.close()
        tier = open_tier()
    assert tier.get(make_ids(range(3))) == [blob for _, blob in pages]
    assert tier.used_bytes == sum(len(blob) for _, blob in pages)
    tier.check()
    tier.close()


def test_a_page_with_a_broken_header_is_listed_and_can_be_deleted(
    open_tier: Callable[[], NvmeTier], make_page: MakePage, tmp_path: Path
) -> None:
    tier = open_tier()
    pages = [make_page(0), make_page(1)]
    tier.put(pages)
    flip(segments(tmp_path)[0], 30)
    headers = {header.id: header for header in tier.stored()}
    assert {page_id: header.page_tokens for page_id, header in headers.items()} == {
        make_id(0): 0,
        make_id(1): 8,
    }
    assert headers[make_id(0)].record_bytes == len(pages[0][1])
    tier.delete(make_ids(range(2)))
    assert list(tier.stored()) == []
    tier.check()
    tier.close()


def test_a_page_that_is_deleted_while_pages_are_listed_is_left_out(
    open_tier: Callable[[], NvmeTier], make_page: MakePage
) -> None:
    tier = open_tier()
    pages = [make_page(number) for number in range(3)]
    tier.put(pages)
    listed = tier.stored()
    first = next(listed)
    tier.delete([pages[1][0]])
    assert [header.id for header in (first, *listed)] == [pages[0][0], pages[2][0]]


def test_a_deletion_that_became_unreadable_gives_back_the_same_page(
    open_tier: Callable[[], NvmeTier], make_page: MakePage, tmp_path: Path
) -> None:
    """What its id names: it is deleted again as a page that nobody knows."""
    tier = open_tier()
    tier.put([make_page(number) for number in range(3)])
    tier.delete([make_id(1)])
    tier.put([make_page(3)])
    tier.flush()
    tier.close()
    flip(segments(tmp_path)[1], 8)
    again = open_tier()
    assert again.get(make_ids(range(4))) == [make_page(number)[1] for number in range(4)]
    again.check()
    again.close()


@pytest.mark.parametrize("version", [1, 4])
@pytest.mark.parametrize("number", [0, 2, 5])
def test_a_directory_of_another_format_version_is_refused_and_not_changed(
    open_tier: Callable[[], NvmeTier],
    make_page: MakePage,
    tmp_path: Path,
    number: int,
    version: int,
) -> None:
    tier = open_tier()
    tier.put([make_page(each) for each in range(6)])
    tier.flush()
    tier.close()
    path = segments(tmp_path)[number // 3]
    raw = bytearray(path.read_bytes())
    offset = number % 3 * len(make_page(0)[1])
    raw[offset + 4] = version
    checksum = google_crc32c.value(bytes(raw[offset : offset + HEADER_BYTES - 4]))
    raw[offset + HEADER_BYTES - 4 : offset + HEADER_BYTES] = checksum.to_bytes(4, "little")
    path.write_bytes(raw)
    before = {each.name: each.read_bytes() for each in segments(tmp_path)}
    with pytest.raises(
        PageVersionError, match=f"{path} at byte {offset}: found a page of format version {version}"
    ):
        open_tier()
    assert {each.name: each.read_bytes() for each in segments(tmp_path)} == before


def test_a_directory_has_one_owner(open_tier: Callable[[], NvmeTier], tmp_path: Path) -> None:
    tier = open_tier()
    with pytest.raises(DirectoryLockedError, match=str(tmp_path / "rows")):
        open_tier()
    tier.close()
    open_tier().close()


def test_a_directory_that_cannot_be_created_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(TierFailedError, match="file"):
        NvmeTier(tmp_path / "file" / "rows")


@pytest.fixture
def file_size_limit() -> Iterator[Callable[[int], None]]:
    """Factory `file_size_limit(bytes)`: the kernel truncates writes there until the test ends."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda limit: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_truncated_write_leaves_the_tier_unchanged(
    open_tier: Callable[[], NvmeTier], make_page: MakePage, file_size_limit: Callable[[int], None]
) -> None:
    tier = open_tier()
    tier.put([make_page(0)])
    tier.flush()
    before = tier.file_bytes
    file_size_limit(before + 500)
    with pytest.raises(TierFailedError, match="segment-00000001"):
        tier.put([make_page(1)])
    assert (tier.file_bytes, tier.get([make_id(1)])) == (before, [None])
    file_size_limit(1 << 30)
    tier.put([make_page(2)])
    tier.flush()
    tier.close()
    again = open_tier()
    assert again.get(make_ids(range(3))) == [make_page(0)[1], None, make_page(2)[1]]
    again.check()
    again.close()


def test_deleting_is_possible_when_the_tier_is_full(
    layout: PageLayout, make_page: MakePage, tmp_path: Path
) -> None:
    tier = NvmeTier(tmp_path / "rows", limit_bytes=2 * layout.page_bytes)
    tier.put([make_page(0), make_page(1)])
    with pytest.raises(TierFullError):
        tier.put([make_page(2)])
    tier.delete(make_ids(range(2)))
    tier.put([make_page(2)])
    tier.close()


def test_pages_leave_the_reserve_of_the_disk_free(make_page: MakePage, tmp_path: Path) -> None:
    tier = NvmeTier(tmp_path / "rows", reserve_bytes=0)
    tier.put([make_page(0), make_page(1)])
    tier.close()
    disk = os.statvfs(tmp_path)
    tier = NvmeTier(tmp_path / "rows", reserve_bytes=disk.f_bavail * disk.f_frsize + (1 << 30))
    with pytest.raises(TierFullError, match="reserved"):
        tier.put([make_page(2)])
    assert tier.get([make_id(0)]) == [make_page(0)[1]]
    assert list(tier.compact(0.0)) == [], "moving records would need the reserve"
    tier.delete(make_ids(range(2)))
    assert tier.used_bytes == 0
    tier.check()
    tier.close()
