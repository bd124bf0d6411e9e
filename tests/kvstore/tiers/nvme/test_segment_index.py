"""A store starts from the index files of closed segments, and without them as well."""

import os
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.format.page import PageKey, PageLayout, RecordKind
from kvstore.store import RowStore
from kvstore.tiers.nvme import segment_index
from kvstore.tiers.nvme.index import LogIndex, RecordLocation
from kvstore.tiers.nvme.segment import SegmentFile
from kvstore.tiers.nvme.segment_index import IndexEntry, SegmentEntries
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.tiers.ram import RamTier

MakePage = Callable[..., tuple[PageKey, bytes]]
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


def contents(tier: NvmeTier) -> dict[PageKey, Any]:
    return {header.key: header for header in tier.stored()}


def fill(tier: NvmeTier, make_page: MakePage) -> None:
    tier.put([make_page(index % 5, index + 1, f"s-{index // 5}") for index in range(30)])
    tier.delete([PageKey("s-1", 2), PageKey("s-4", 0)])
    tier.put([make_page(1, 100, "s-0")])
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


def test_a_store_reads_one_header_per_session_at_its_start(
    open_tier: OpenTier, make_page: MakePage, layout: PageLayout, reads: list[int]
) -> None:
    tier = open_tier()
    tier.put([make_page(index, index + 1, session) for session in "ab" for index in range(30)])
    tier.close()
    reads.clear()
    store = RowStore(layout, [RamTier(1 << 20), open_tier()])
    assert len(reads) < 15
    assert store.sessions() == ["a", "b"]
    store.close()


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
    assert again._log._index._damaged, "the damaged header was noticed"


def test_index_files_go_with_their_segments(
    open_tier: OpenTier, make_page: MakePage, tmp_path: Path
) -> None:
    tier = open_tier()
    fill(tier, make_page)
    tier.delete(list(contents(tier)))
    tier.flush()
    left = {path.stem for path in (tmp_path / "rows").glob("*.kv")}
    assert {path.stem for path in (tmp_path / "rows").glob("*.index")} <= left


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


ENTRIES = st.lists(
    st.builds(
        IndexEntry,
        kind=st.sampled_from([int(RecordKind.PAGE), int(RecordKind.TOMBSTONE)]),
        session=st.text(min_size=1, max_size=20),
        page=st.integers(0, 2**32 - 1),
        sequence=st.integers(0, 2**64 - 1),
        offset=st.integers(0, 2**40 - 1),
        size=st.integers(192, 2**32 - 1),
    ),
    max_size=20,
)


@given(ENTRIES, st.lists(st.integers(0, 2**40), max_size=3))
@settings(max_examples=60, deadline=None)
def test_an_index_file_returns_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, entries: list[IndexEntry], damaged: list[int]
) -> None:
    segment = SegmentFile(tmp_path_factory.mktemp("log") / "segment-00000001.kv", 1)
    written = SegmentEntries(entries, tuple(damaged), 77)
    segment_index.write_index(segment, written)
    assert segment_index.read_closed(segment) == written


@given(
    st.lists(
        st.tuples(
            st.sampled_from("ab"), st.integers(0, 3), st.integers(0, 2**64 - 1), st.booleans()
        ),
        max_size=30,
    )
)
def test_the_index_finds_the_newest_record_of_every_page(
    records: list[tuple[str, int, int, bool]],
) -> None:
    index = LogIndex()
    expected: dict[PageKey, RecordLocation] = {}
    for number, (session, page, sequence, is_deletion) in enumerate(records):
        key = PageKey(session, page)
        if is_deletion:
            index.add_tombstone(key, number // 4)
            expected.pop(key, None)
            continue
        location = RecordLocation(number // 4, 1000 * number, 192 + number, sequence)
        index.add_page(key, location)
        if key not in expected or expected[key].sequence <= sequence:
            expected[key] = location
    assert dict(index.locations()) == expected
    assert {key: index.get(key) for key in expected} == expected
    assert {key.session for key, _ in index.one_per_session()} == {key.session for key in expected}
    index.check()


def test_a_page_takes_little_memory_in_the_index() -> None:
    pages = 20_000
    tracemalloc.start()
    index = LogIndex()
    for number in range(pages):
        key = PageKey(f"session-{number // 300}", number % 300)
        location = RecordLocation(number // 64, 1 << 20 | number, 1 << 20, 1 << 33 | number)
        index.add_page(key, location)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken / pages < 200
