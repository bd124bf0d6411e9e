"""A store starts from the index files of closed segments, and without them as well."""

import os
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.format.page import ID_BYTES, PageId, PageLayout, RecordKind
from kvstore.tiers.nvme import segment_index
from kvstore.tiers.nvme.index import LogIndex, RecordLocation
from kvstore.tiers.nvme.segment import SegmentFile
from kvstore.tiers.nvme.segment_index import IndexEntry
from kvstore.tiers.nvme.tier import NvmeTier
from tests.kvstore.page_ids import make_id, make_ids

MakePage = Callable[..., tuple[PageId, bytes]]
OpenTier = Callable[[], NvmeTier]


@pytest.fixture
def open_tier(layout: PageLayout, tmp_path: Path) -> Iterator[OpenTier]:
    """Factory: a tier with segments of three pages."""
    opened: list[NvmeTier] = []

    def open_one() -> NvmeTier:
        opened.append(
            NvmeTier(
                tmp_path / "rows",
                segment_bytes=3 * layout.page_bytes,
                compact_in_background=False,
            )
        )
        return opened[-1]

    yield open_one
    for tier in opened:
        tier.close()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Offsets of the reads of segment files."""
    offsets: list[int] = []
    read = SegmentFile.read_into

    def counted(segment: SegmentFile, record: memoryview, offset: int) -> memoryview:
        offsets.append(offset)
        return read(segment, record, offset)

    monkeypatch.setattr(SegmentFile, "read_into", counted)
    return offsets


def contents(tier: NvmeTier) -> dict[PageId, Any]:
    return {header.id: header for header in tier.stored()}


def fill(tier: NvmeTier, make_page: MakePage) -> None:
    tier.put([make_page(number, written_at=number) for number in range(30)])
    tier.delete([make_id(7), make_id(20)])
    tier.put([make_page(7, written_at=100)])
    tier.flush()


def test_a_start_reads_no_header_of_a_closed_segment(
    open_tier: OpenTier, make_page: MakePage, reads: list[int]
) -> None:
    tier = open_tier()
    fill(tier, make_page)
    expected = contents(tier)
    tier.close()
    reads.clear()
    again = open_tier()
    assert len(reads) < 10, "those of the newest segment"
    assert contents(again) == expected
    again.check()


def test_a_list_of_ids_reads_no_file(
    open_tier: OpenTier, make_page: MakePage, reads: list[int]
) -> None:
    tier = open_tier()
    fill(tier, make_page)
    tier.close()
    again = open_tier()
    reads.clear()
    assert sorted(again.list_ids(10)) == sorted(
        make_id(number) for number in range(10) if number != 7
    )
    assert set(again.list_ids(1000)) == set(make_ids(range(30))) - {make_id(20)}
    assert reads == []


@pytest.mark.parametrize("damage", ["missing", "truncated", "flipped", "empty"])
def test_without_a_usable_index_file_the_headers_are_read_and_it_is_written_again(
    open_tier: OpenTier, make_page: MakePage, tmp_path: Path, reads: list[int], damage: str
) -> None:
    tier = open_tier()
    fill(tier, make_page)
    expected = contents(tier)
    tier.close()
    for path in (tmp_path / "rows").glob("*.index"):
        content = path.read_bytes()
        if damage == "missing":
            path.unlink()
        elif damage == "flipped":
            path.write_bytes(content[:60] + bytes([content[60] ^ 1]) + content[61:])
        else:
            path.write_bytes(content[:-7] if damage == "truncated" else b"")
    reads.clear()
    again = open_tier()
    assert len(reads) > 25
    assert contents(again) == expected
    again.check()
    again.close()
    reads.clear()
    open_tier()
    assert len(reads) < 20


def test_an_index_file_of_another_content_is_not_used(
    open_tier: OpenTier, make_page: MakePage, tmp_path: Path
) -> None:
    tier = open_tier()
    fill(tier, make_page)
    tier.close()
    path = min((tmp_path / "rows").glob("segment-*.kv"))
    with path.open("r+b") as file:
        file.write(b"\0" * 192)
    os.utime(path)
    again = open_tier()
    assert again.contains(make_ids(range(3))) == [False, True, True], "the header was read"


def test_index_files_go_with_their_segments(
    open_tier: OpenTier, make_page: MakePage, tmp_path: Path
) -> None:
    tier = open_tier()
    fill(tier, make_page)
    tier.delete(list(contents(tier)))
    tier.flush()
    left = {path.stem for path in (tmp_path / "rows").glob("*.kv")}
    assert {path.stem for path in (tmp_path / "rows").glob("*.index")} <= left


def test_a_segment_that_another_thread_removes_while_it_is_read_leaves_no_index_file(
    tmp_path: Path,
) -> None:
    segment = SegmentFile(tmp_path / "segment-00000001.kv", 1)
    segment_index.write_index(segment, [])
    assert [path.suffix for path in tmp_path.glob("*.index")] == [".index"]
    segment.path.unlink()
    assert list(segment_index.read_closed(segment)) == []
    segment_index.remove_index(segment)
    assert list(segment_index.read_closed(segment)) == []
    assert list(tmp_path.iterdir()) == []


def test_index_files_that_a_crash_left_are_removed_at_the_next_start(
    open_tier: OpenTier, make_page: MakePage, tmp_path: Path
) -> None:
    tier = open_tier()
    fill(tier, make_page)
    tier.close()
    rows = tmp_path / "rows"
    closed = {path.stem for path in rows.glob("*.index")}
    newest = max(rows.glob("*.kv"))
    for stray in (rows / "segment-00000077.index", newest.with_suffix(".index")):
        stray.write_bytes(b"of a segment that was unlinked, or is not closed")
    open_tier()
    assert closed
    assert {path.stem for path in rows.glob("*.index")} == closed


IDS = st.binary(min_size=ID_BYTES, max_size=ID_BYTES)
ENTRIES = st.lists(
    st.builds(
        IndexEntry,
        kind=st.sampled_from([int(RecordKind.PAGE), int(RecordKind.TOMBSTONE)]),
        id=st.one_of(IDS, st.just(bytes(ID_BYTES))),
        offset=st.integers(0, 2**40 - 1),
        size=st.integers(192, 2**32 - 1),
        written_at=st.integers(0, 2**64 - 1),
    ),
    max_size=20,
)


@given(ENTRIES)
@settings(max_examples=60, deadline=None)
def test_an_index_file_returns_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, entries: list[IndexEntry]
) -> None:
    segment = SegmentFile(tmp_path_factory.mktemp("log") / "segment-00000001.kv", 1)
    segment_index.write_index(segment, entries)
    assert list(segment_index.read_closed(segment)) == entries


@given(
    st.lists(
        st.tuples(st.integers(0, 7), st.integers(0, 2**64 - 1), st.booleans()),
        max_size=30,
    )
)
def test_the_index_finds_the_last_record_of_every_page(
    records: list[tuple[int, int, bool]],
) -> None:
    index = LogIndex()
    expected: dict[PageId, RecordLocation] = {}
    for number, (page, written_at, is_deletion) in enumerate(records):
        page_id = make_id(page)
        if is_deletion:
            index.add_tombstone(page_id, number // 4)
            expected.pop(page_id, None)
        else:
            location = RecordLocation(number // 4, 1000 * number, 192 + number, written_at)
            index.add_page(page_id, location)
            expected[page_id] = location
    assert dict(index.locations()) == expected
    assert {page_id: index.get(page_id) for page_id in expected} == expected
    index.check()


def test_a_page_takes_little_memory_in_the_index() -> None:
    pages = 20_000
    tracemalloc.start()
    index = LogIndex()
    for number in range(pages):
        location = RecordLocation(number // 64, 1 << 20 | number, 1 << 20, 1_800_000_000 + number)
        index.add_page(make_id(number), location)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken / pages < 200
