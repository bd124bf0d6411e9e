"""Compaction unlinks mostly dead segments, and at no moment loses or revives a page."""

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import CorruptPageError
from kvstore.format.page import HEADER_BYTES, PageHeader, PageId, PageLayout, parse_header, seal
from kvstore.tiers.nvme.segment import SegmentFile
from kvstore.tiers.nvme.segment_log import SegmentLog
from kvstore.tiers.nvme.tier import NvmeTier
from tests.kvstore.page_ids import make_id

MakePage = Callable[..., tuple[PageId, bytes]]
Pages = dict[PageId, bytes]
PAGES_PER_SEGMENT = 4


@pytest.fixture
def open_tier(layout: PageLayout) -> Iterator[Callable[..., NvmeTier]]:
    """Factory `open_tier(directory, **settings)`: segments of four pages."""
    opened: list[NvmeTier] = []

    def open_one(
        directory: Path, compact_in_background: bool = False, limit_bytes: int | None = None
    ) -> NvmeTier:
        size = PAGES_PER_SEGMENT * layout.page_bytes
        tier = NvmeTier(
            directory,
            segment_bytes=size,
            limit_bytes=limit_bytes,
            compact_in_background=compact_in_background,
        )
        opened.append(tier)
        return tier

    yield open_one
    for tier in opened:
        tier.close()


def seal_page(number: int, written_at: int) -> tuple[PageId, bytes]:
    """A page of a length that depends on its number. Of equal ones `written_at` tells which it is."""
    payload = bytes([number]) * (300 + 40 * number)
    page_id = make_id(number)
    return page_id, seal(PageHeader(page_id, len(payload), written_at), payload)


def names(directory: Path) -> list[int]:
    return sorted(
        int(path.stem.removeprefix("segment-")) for path in directory.glob("segment-*.kv")
    )


def newest(directory: Path) -> Path:
    return max(directory.glob("segment-*.kv"))


def has_exactly(tier: NvmeTier, expected: Pages) -> bool:
    ids = [header.id for header in tier.stored()]
    tier.check()
    return dict(zip(ids, tier.get(ids), strict=True)) == expected


def put_fragmented(tier: NvmeTier, make_page: MakePage) -> Pages:
    """Fill three segments and delete all but one page of each; return the stored pages."""
    pages = [make_page(number) for number in range(3 * PAGES_PER_SEGMENT)]
    tier.put(pages)
    kept = dict(pages[::PAGES_PER_SEGMENT])
    tier.delete([page_id for page_id, _ in pages if page_id not in kept])
    return kept


def test_a_flush_visits_no_deleted_page(
    open_tier: Callable[..., NvmeTier], make_page: MakePage, tmp_path: Path
) -> None:
    """Neither the flush nor the look for a segment to compact that follows it."""

    class Visited(bytes):
        """An id that counts how often it is looked up."""

        __slots__ = ()

        def __hash__(self) -> int:
            visits.append(self)
            return super().__hash__()

    visits: list[bytes] = []
    deleted = 200  # their tombstones fill segments behind the pages'
    tier = open_tier(tmp_path)
    pages = [(Visited(page_id), blob) for page_id, blob in map(make_page, range(2 * deleted))]
    tier.put(pages)
    tier.delete([page_id for page_id, _ in pages[::2]])
    tier.flush()
    tier.put([make_page(2 * deleted)])
    assert visits
    visits.clear()
    tier.flush()
    assert tier._log.find_compactable(1.0, 1 << 40) is None
    assert not visits


def test_valid_records_move_and_their_segments_are_unlinked(
    open_tier: Callable[..., NvmeTier], make_page: MakePage, layout: PageLayout, tmp_path: Path
) -> None:
    tier = open_tier(tmp_path)
    stored = put_fragmented(tier, make_page)
    assert names(tmp_path)[:3] == [1, 2, 3]
    moved = list(tier.compact())
    assert moved == [layout.page_bytes] * 3
    assert not {1, 2, 3} & set(names(tmp_path))
    assert tier.used_bytes == 3 * layout.page_bytes
    assert tier.file_bytes < tier.used_bytes + 20 * HEADER_BYTES
    assert has_exactly(tier, stored)
    tier.close()
    assert has_exactly(open_tier(tmp_path), stored)


@pytest.mark.parametrize("torn_bytes", [0, 1, 100, HEADER_BYTES, 1000])
def test_a_kill_after_any_step_loses_and_revives_nothing(
    open_tier: Callable[..., NvmeTier], make_page: MakePage, tmp_path: Path, torn_bytes: int
) -> None:
    tier = open_tier(tmp_path / "rows")
    stored = put_fragmented(tier, make_page)
    for step, _ in enumerate(tier.compact()):
        copy = tmp_path / f"copy-{step}"
        shutil.copytree(tmp_path / "rows", copy)
        # The record that was moved last is not synced yet, so it may be torn.
        newest(copy).write_bytes(
            newest(copy).read_bytes()[: newest(copy).stat().st_size - torn_bytes]
        )
        again = open_tier(copy)
        assert has_exactly(again, stored)
        list(again.compact())
        assert not {1, 2, 3} & set(names(copy))
        assert has_exactly(again, stored)
        again.put([make_page(1)])
        again.flush()
        again.close()
        assert has_exactly(open_tier(copy), stored | dict([make_page(1)]))
    assert has_exactly(tier, stored)


def test_a_torn_copy_of_a_moved_record_is_ignored(
    open_tier: Callable[..., NvmeTier], make_page: MakePage, tmp_path: Path
) -> None:
    tier = open_tier(tmp_path / "rows")
    stored = put_fragmented(tier, make_page)
    next(tier.compact())
    copy = shutil.copytree(tmp_path / "rows", tmp_path / "copy")
    raw = bytearray(newest(copy).read_bytes())
    raw[-10] ^= 1
    newest(copy).write_bytes(raw)
    assert has_exactly(open_tier(copy), stored)


@pytest.mark.parametrize("change", ["delete", "delete and put again"])
def test_a_page_that_changes_while_it_moves_is_not_reverted(
    open_tier: Callable[..., NvmeTier], make_page: MakePage, tmp_path: Path, change: str
) -> None:
    tier = open_tier(tmp_path)
    stored = put_fragmented(tier, make_page)
    moving = tier.compact()
    next(moving)
    for number in (0, 4, 8):  # Only the first has been moved.
        page_id, blob = make_page(number, written_at=7)
        tier.delete([page_id])
        del stored[page_id]
        if change != "delete":
            tier.put([(page_id, blob)])
            stored[page_id] = blob
    list(moving)
    tier.flush()
    assert has_exactly(tier, stored)
    tier.close()
    assert has_exactly(open_tier(tmp_path), stored)


def test_a_page_that_is_deleted_while_its_record_is_copied_stays_deleted(
    open_tier: Callable[..., NvmeTier],
    make_page: MakePage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tier = open_tier(tmp_path)
    stored = put_fragmented(tier, make_page)
    read = SegmentFile.read

    def read_and_delete(segment: SegmentFile, offset: int, size: int) -> memoryview:
        record = read(segment, offset, size)
        page_id = parse_header(record).id
        if stored.pop(page_id, None) is not None:
            tier.delete([page_id])
        return record

    monkeypatch.setattr(SegmentFile, "read", read_and_delete)
    list(tier.compact())
    monkeypatch.undo()
    assert stored == {}
    assert has_exactly(tier, {})


def test_tombstones_move_while_an_older_segment_needs_them(
    open_tier: Callable[..., NvmeTier], make_page: MakePage, tmp_path: Path
) -> None:
    tier = open_tier(tmp_path)
    pages = [make_page(number) for number in range(3 * PAGES_PER_SEGMENT)]
    tier.put(pages[:-1])
    tier.delete([pages[0][0]])  # in the third segment, as are the next three pages
    tier.put(pages[-1:])
    tier.delete([page_id for page_id, _ in pages[2 * PAGES_PER_SEGMENT :]])
    list(tier.compact())
    assert 3 not in names(tmp_path)
    stored = dict(pages[1 : 2 * PAGES_PER_SEGMENT])
    assert has_exactly(tier, stored)
    tier.close()
    assert has_exactly(open_tier(tmp_path), stored)


def test_an_unlinked_segment_stays_readable_for_its_readers(
    layout: PageLayout, make_page: MakePage, tmp_path: Path
) -> None:
    log = SegmentLog(tmp_path, PAGES_PER_SEGMENT * layout.page_bytes, "log")
    pages = [make_page(number) for number in range(PAGES_PER_SEGMENT + 1)]
    for page in pages:
        log.append_page(*page)
    (located,) = log.locate([pages[0][0]])
    assert located is not None
    location, segment = located
    assert len(list(log.move_records(1))) == PAGES_PER_SEGMENT
    assert names(tmp_path) == [2, 3]
    assert segment.read(location.offset, location.size) == pages[0][1]
    assert log.locate([pages[0][0]]) != [located]
    log.close()


def test_a_corrupt_page_is_not_moved_and_its_segment_stays(
    open_tier: Callable[..., NvmeTier], make_page: MakePage, tmp_path: Path
) -> None:
    tier = open_tier(tmp_path)
    stored = put_fragmented(tier, make_page)
    first = tmp_path / "segment-00000001.kv"
    raw = bytearray(first.read_bytes())
    raw[HEADER_BYTES + 5] ^= 1
    first.write_bytes(raw)
    list(tier.compact())
    assert names(tmp_path)[0] == 1
    assert not {2, 3} & set(names(tmp_path))
    with pytest.raises(CorruptPageError, match=f"page {make_id(0).hex()}"):
        tier.get([make_id(0)])
    assert list(tier.compact()) == []
    tier.put([make_page(0)])
    tier.flush()
    assert 1 not in names(tmp_path)
    assert has_exactly(tier, stored)


def test_pages_before_an_unreadable_record_move_as_others(
    open_tier: Callable[..., NvmeTier], make_page: MakePage, tmp_path: Path
) -> None:
    tier = open_tier(tmp_path)
    stored = put_fragmented(tier, make_page)
    tier.close()
    third = tmp_path / "segment-00000003.kv"
    raw = bytearray(third.read_bytes())
    raw[len(make_page(0)[1]) + 8] ^= 1  # the header of a deleted page
    third.write_bytes(raw)
    again = open_tier(tmp_path)
    assert len(list(again.compact())) == 3
    assert not {1, 2, 3} & set(names(tmp_path))
    assert has_exactly(again, stored)


def test_a_tier_at_its_limit_compacts_before_it_refuses(
    open_tier: Callable[..., NvmeTier], make_page: MakePage, layout: PageLayout, tmp_path: Path
) -> None:
    tier = open_tier(tmp_path, limit_bytes=7 * layout.page_bytes)
    stored: Pages = {}
    for turn in range(1, 30):
        page_id, blob = make_page(turn % 4, written_at=turn)
        tier.delete([page_id])
        tier.put([(page_id, blob)])
        stored[page_id] = blob
        assert tier.file_bytes <= 8 * layout.page_bytes
    assert has_exactly(tier, stored)


def test_a_tier_compacts_in_the_background_while_it_is_used(
    open_tier: Callable[..., NvmeTier], make_page: MakePage, layout: PageLayout, tmp_path: Path
) -> None:
    tier = open_tier(tmp_path, compact_in_background=True)
    wrong: list[PageId] = []
    stored: Pages = {}

    def use(chain: str) -> None:
        for turn in range(1, 30):
            page_id, blob = make_page(turn % 6, chain, written_at=turn)
            if turn % 2:
                tier.delete([page_id])
                stored.pop(page_id, None)
            tier.put([(page_id, stored.setdefault(page_id, blob))])
            wrong.extend([page_id] * (tier.get([page_id]) != [stored[page_id]]))
            if turn % 5 == 0:
                tier.delete([page_id])
                del stored[page_id]
            if turn % 3 == 0:
                tier.flush()

    threads = [Thread(target=use, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    tier.flush()
    last = time.monotonic() + 20
    while tier.file_bytes > 2 * tier.used_bytes + PAGES_PER_SEGMENT * layout.page_bytes:
        assert time.monotonic() < last, f"{tier.file_bytes} bytes of files for {tier.used_bytes}"
        time.sleep(0.02)
    assert has_exactly(tier, stored)
    tier.close()
    assert has_exactly(open_tier(tmp_path), stored)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 7)),
        st.tuples(st.just("delete"), st.integers(0, 7)),
        st.tuples(st.sampled_from(["flush", "move", "reopen"]), st.just(0)),
    ),
    max_size=60,
)


@given(steps=STEPS)
@settings(max_examples=60, deadline=None)
def test_a_tier_behaves_like_a_dictionary_during_compaction(
    steps: list[tuple[str, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("rows")
    tier = NvmeTier(directory, segment_bytes=3000, compact_in_background=False)
    stored: Pages = {}
    for turn, (step, number) in enumerate(steps, 1):
        page_id, blob = seal_page(number, turn)
        if step == "put":
            tier.put([(page_id, blob)])
            stored[page_id] = blob
        elif step == "delete":
            tier.delete([page_id])
            stored.pop(page_id, None)
        elif step == "flush":
            tier.flush()
        elif step == "move":
            next(tier.compact(0.3), None)
        else:
            tier.close()
            tier = NvmeTier(directory, segment_bytes=3000, compact_in_background=False)
        assert has_exactly(tier, stored)
    tier.close()
