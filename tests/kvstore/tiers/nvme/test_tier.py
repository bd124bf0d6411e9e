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
from kvstore.format.page import HEADER_BYTES, PageKey, PageLayout
from kvstore.tiers.nvme.tier import NvmeTier

MakePage = Callable[..., tuple[PageKey, bytes]]


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
    pages = [make_page(index) for index in range(10)]
    tier.put(pages)
    tier.flush()
    tier.close()
    again = open_tier()
    assert again.get([key for key, _ in pages]) == [blob for _, blob in pages]
    assert again.used_bytes == sum(len(blob) for _, blob in pages)
    again.check()
    again.close()


def test_the_newest_version_and_every_delete_survive_a_restart(
    open_tier: Callable[[], NvmeTier], make_page: MakePage
) -> None:
    tier = open_tier()
    tier.put([make_page(index, sequence) for sequence in (1, 2, 3) for index in range(4)])
    tier.delete([PageKey("s", 1), PageKey("s", 3)])
    tier.close()
    again = open_tier()
    assert again.contains([PageKey("s", index) for index in range(4)]) == [True, False, True, False]
    assert again.get([PageKey("s", 2)]) == [make_page(2, 3)[1]]
    again.close()


def test_dead_segments_are_unlinked(
    open_tier: Callable[[], NvmeTier], make_page: MakePage, tmp_path: Path
) -> None:
    tier = open_tier()
    tier.put([make_page(index) for index in range(9)])
    assert len(segments(tmp_path)) == 3
    tier.delete([PageKey("s", index) for index in (3, 4, 5)])
    tier.flush()
    assert [path.name for path in segments(tmp_path)][:2] == [
        "segment-00000001.kv",
        "segment-00000003.kv",
    ]
    tier.delete([PageKey("s", index) for index in range(9)])
    tier.flush()
    assert len(segments(tmp_path)) == 1
    assert (tier.used_bytes, tier.file_bytes) == (0, 0)
    tier.close()


def test_tombstones_are_removed_with_the_last_segment_that_needed_them(
    open_tier: Callable[[], NvmeTier], make_page: MakePage, tmp_path: Path
) -> None:
    tier = open_tier()
    tier.put([make_page(index) for index in range(5)])
    first, newest = segments(tmp_path)
    tier.delete([PageKey("s", index) for index in (3, 4)])
    tier.flush()
    tier.delete([PageKey("s", index) for index in (0, 1, 2)])
    tier.flush()
    assert not first.exists()
    assert not newest.exists()
    assert tier.file_bytes == 0
    tier.check()
    tier.close()


def test_a_dead_segment_stays_until_its_successors_are_on_the_disk(
    open_tier: Callable[[], NvmeTier], make_page: MakePage, tmp_path: Path
) -> None:
    tier = open_tier()
    tier.put([make_page(index, 1) for index in range(3)])
    tier.flush()
    tier.put([make_page(index, 2) for index in range(3)])
    assert segments(tmp_path)[0].name == "segment-00000001.kv"
    tier.flush()
    assert segments(tmp_path)[0].name != "segment-00000001.kv"
    tier.close()


def test_a_tombstone_outlives_every_older_copy_of_its_page(
    open_tier: Callable[[], NvmeTier], make_page: MakePage, tmp_path: Path
) -> None:
    tier = open_tier()
    tier.put(
        [make_page(0, 1), make_page(1, 1), make_page(2, 1)]
    )  # Segment 1: page 0 dies, page 1 stays.
    tier.put([make_page(0, 2), make_page(3, 1), make_page(4, 1)])
    tier.delete([PageKey("s", 0)])
    tier.delete([PageKey("s", 3), PageKey("s", 4), PageKey("s", 2)])
    tier.put([make_page(index) for index in range(5, 11)])  # The tombstone's segment is full now.
    tier.delete([PageKey("s", index) for index in range(5, 11)])
    tier.close()
    assert segments(tmp_path)[0].name == "segment-00000001.kv"
    again = open_tier()
    assert [header.key.index for header in again.stored()] == [1]
    again.close()


@pytest.mark.parametrize("lost_bytes", [1, 100, 400])
def test_a_torn_tail_is_truncated_and_overwritten(
    open_tier: Callable[[], NvmeTier], make_page: MakePage, tmp_path: Path, lost_bytes: int
) -> None:
    tier = open_tier()
    tier.put([make_page(0, 1)])
    tier.flush()
    tier.put([make_page(0, 2)])
    tier.close()
    torn = segments(tmp_path)[0]
    torn.write_bytes(torn.read_bytes()[:-lost_bytes])
    again = open_tier()
    assert again.get([PageKey("s", 0)]) == [make_page(0, 1)[1]]
    again.put([make_page(0, 3)])
    again.flush()
    again.close()
    third = open_tier()
    assert third.get([PageKey("s", 0)]) == [make_page(0, 3)[1]]
    third.close()


def test_a_torn_unsynced_page_is_replaced_by_the_synced_version(
    open_tier: Callable[[], NvmeTier], make_page: MakePage, tmp_path: Path
) -> None:
    tier = open_tier()
    tier.put([make_page(0, 1)])
    tier.flush()
    tier.put([make_page(0, 2)])
    end = tier.file_bytes
    tier.close()
    flip(segments(tmp_path)[0], end - 10)
    again = open_tier()
    assert again.get([PageKey("s", 0)]) == [make_page(0, 1)[1]]
    again.close()


@pytest.mark.parametrize("open_again", [False, True])
def test_a_flipped_bit_in_a_payload_is_refused_and_others_are_read(
    open_tier: Callable[[], NvmeTier], make_page: MakePage, tmp_path: Path, open_again: bool
) -> None:
    tier = open_tier()
    pages = [make_page(0, 1), make_page(0, 2), make_page(1, 3)]
    tier.put(pages)
    tier.flush()
    flip(segments(tmp_path)[0], len(pages[0][1]) + HEADER_BYTES + 5)
    if open_again:
        tier.close()
        tier = open_tier()
    with pytest.raises(CorruptPageError, match="page 0 of session 's'"):
        tier.get([PageKey("s", 0)])
    assert tier.get([PageKey("s", 1)]) == [pages[2][1]]
    tier.close()


@pytest.mark.parametrize("at", range(0, HEADER_BYTES, 13))
def test_a_flipped_bit_in_a_header_never_revives_an_older_version(
    open_tier: Callable[[], NvmeTier], make_page: MakePage, tmp_path: Path, at: int
) -> None:
    tier = open_tier()
    pages = [make_page(0, 1), make_page(0, 2), make_page(1, 3)]
    tier.put(pages)
    tier.flush()
    tier.close()
    flip(segments(tmp_path)[0], len(pages[0][1]) + at)
    again = open_tier()
    with pytest.raises(CorruptPageError):
        again.get([PageKey("s", 0)])
    assert again.get([PageKey("s", 1)]) == [pages[2][1]]
    again.close()


def test_a_bit_that_flips_while_the_tier_is_open_is_refused(
    open_tier: Callable[[], NvmeTier], make_page: MakePage, tmp_path: Path
) -> None:
    tier = open_tier()
    tier.put([make_page(0)])
    flip(segments(tmp_path)[0], 30)
    with pytest.raises(CorruptPageError):
        tier.get([PageKey("s", 0)])
    tier.close()


def test_a_page_with_a_broken_header_can_be_replaced_and_deleted(
    open_tier: Callable[[], NvmeTier], make_page: MakePage, tmp_path: Path
) -> None:
    tier = open_tier()
    pages = [make_page(0), make_page(1)]
    tier.put(pages)
    flip(segments(tmp_path)[0], 30)
    broken, whole = sorted(tier.stored("s"), key=lambda header: header.key)
    assert (broken.key, broken.sequence, broken.valid_tokens) == (PageKey("s", 0), 1, 0)
    assert broken.record_bytes == len(pages[0][1])
    assert (whole.key, whole.valid_tokens) == (PageKey("s", 1), 8)
    tier.put([pages[0]])
    assert tier.get([PageKey("s", 0)]) == [pages[0][1]]
    tier.delete([PageKey("s", 0), PageKey("s", 1)])
    assert list(tier.stored()) == []
    tier.close()


def test_damage_is_forgotten_with_the_pages_it_may_have_superseded(
    open_tier: Callable[[], NvmeTier], make_page: MakePage, tmp_path: Path
) -> None:
    tier = open_tier()
    tier.put([make_page(index) for index in range(6)])
    tier.flush()
    tier.close()
    flip(segments(tmp_path)[1], 8)
    tier = open_tier()
    with pytest.raises(CorruptPageError, match="may be out of date"):
        tier.get([PageKey("s", 0)])
    tier.delete([PageKey("s", index) for index in range(6)])
    tier.put([make_page(0, 9)])
    tier.flush()
    tier.close()
    again = open_tier()
    assert again.get([PageKey("s", 0)]) == [make_page(0, 9)[1]]
    again.close()


@pytest.mark.parametrize("index", [0, 2, 5])
def test_a_directory_of_another_format_version_is_refused_and_not_changed(
    open_tier: Callable[[], NvmeTier], make_page: MakePage, tmp_path: Path, index: int
) -> None:
    tier = open_tier()
    tier.put([make_page(each) for each in range(6)])
    tier.flush()
    tier.close()
    path = segments(tmp_path)[index // 3]
    raw = bytearray(path.read_bytes())
    offset = index % 3 * len(make_page(0)[1])
    raw[offset + 4] = 2
    checksum = google_crc32c.value(bytes(raw[offset : offset + HEADER_BYTES - 4]))
    raw[offset + HEADER_BYTES - 4 : offset + HEADER_BYTES] = checksum.to_bytes(4, "little")
    path.write_bytes(raw)
    before = {each.name: each.read_bytes() for each in segments(tmp_path)}
    with pytest.raises(
        PageVersionError, match=f"{path} at byte {offset}: found a page of format version 2"
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
    tier.put([make_page(0, 1)])
    tier.flush()
    before = tier.file_bytes
    file_size_limit(before + 500)
    with pytest.raises(TierFailedError, match="segment-00000001"):
        tier.put([make_page(0, 2)])
    assert (tier.file_bytes, tier.get([PageKey("s", 0)])) == (before, [make_page(0, 1)[1]])
    file_size_limit(1 << 30)
    tier.put([make_page(1, 3, tokens=1)])
    tier.flush()
    tier.close()
    again = open_tier()
    assert again.get([PageKey("s", 0), PageKey("s", 1)]) == [
        make_page(0, 1)[1],
        make_page(1, 3, tokens=1)[1],
    ]
    again.check()
    again.close()


def test_deleting_is_possible_when_the_tier_is_full(
    layout: PageLayout, make_page: MakePage, tmp_path: Path
) -> None:
    tier = NvmeTier(tmp_path / "rows", limit_bytes=2 * layout.page_bytes)
    tier.put([make_page(0), make_page(1)])
    with pytest.raises(TierFullError):
        tier.put([make_page(2)])
    tier.delete([PageKey("s", 0), PageKey("s", 1)])
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
    assert tier.get([PageKey("s", 0)]) == [make_page(0)[1]]
    assert list(tier.compact(0.0)) == [], "moving records would need the reserve"
    tier.delete([PageKey("s", 0), PageKey("s", 1)])
    assert tier.used_bytes == 0
    tier.check()
    tier.close()
