"""Segments of mostly dead records are emptied and go, and no moment of that loses a page or brings one back."""

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import CorruptPageError
from kvstore.format.page import HEADER_BYTES, PageHeader, PageKey, PageLayout, seal
from kvstore.tiers.nvme.segment_log import SegmentLog
from kvstore.tiers.nvme.tier import NvmeTier

MakePage = Callable[..., tuple[PageKey, bytes]]
Held = dict[PageKey, bytes]
PAGES_PER_SEGMENT = 4


@pytest.fixture
def open_tier(layout: PageLayout) -> Iterator[Callable[..., NvmeTier]]:
    """open_tier(directory, **settings): segments of four pages; moves records only when it is told to."""
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


def sealed(key: PageKey, sequence: int) -> bytes:
    """A page whose payload, of changing length, says which it is."""
    payload = bytes([key.index, sequence % 256]) * (300 + 40 * key.index)
    return seal(PageHeader(key, sequence, 8, len(payload)), payload)


def names(directory: Path) -> list[int]:
    return sorted(
        int(path.stem.removeprefix("segment-")) for path in directory.glob("segment-*.kv")
    )


def newest(directory: Path) -> Path:
    return max(directory.glob("segment-*.kv"))


def holds(tier: NvmeTier, wanted: Held) -> bool:
    keys = [header.key for header in tier.stored()]
    tier.check()
    return dict(zip(keys, tier.get(keys), strict=True)) == wanted


def fragmented(tier: NvmeTier, make_page: MakePage) -> Held:
    """Three full segments, of each of which one page counts, and a tombstone of each other page; what is held."""
    pages = [make_page(index) for index in range(3 * PAGES_PER_SEGMENT)]
    tier.put(pages)
    tier.delete([key for key, _ in pages if key.index % PAGES_PER_SEGMENT])
    return {key: blob for key, blob in pages if key.index % PAGES_PER_SEGMENT == 0}


def test_what_counts_moves_and_the_rest_is_given_back(
    open_tier: Callable[..., NvmeTier], make_page: MakePage, layout: PageLayout, tmp_path: Path
) -> None:
    tier = open_tier(tmp_path)
    held = fragmented(tier, make_page)
    assert names(tmp_path)[:3] == [1, 2, 3]
    moved = list(tier.compact())
    assert moved == [layout.page_bytes] * 3
    assert not {1, 2, 3} & set(names(tmp_path))
    assert tier.used_bytes == 3 * layout.page_bytes
    assert tier.file_bytes < tier.used_bytes + 20 * HEADER_BYTES
    assert holds(tier, held)
    tier.close()
    assert holds(open_tier(tmp_path), held)


@pytest.mark.parametrize("torn_bytes", [0, 1, 100, HEADER_BYTES, 1000])
def test_a_kill_after_any_step_loses_nothing_and_brings_nothing_back(
    open_tier: Callable[..., NvmeTier], make_page: MakePage, tmp_path: Path, torn_bytes: int
) -> None:
    tier = open_tier(tmp_path / "rows")
    held = fragmented(tier, make_page)
    for step, _ in enumerate(tier.compact()):
        copy = tmp_path / f"copy-{step}"
        shutil.copytree(tmp_path / "rows", copy)
        # The record that was moved last is not synced yet, so it may be there in part.
        newest(copy).write_bytes(
            newest(copy).read_bytes()[: newest(copy).stat().st_size - torn_bytes]
        )
        again = open_tier(copy)
        assert holds(again, held)
        list(again.compact())
        assert not {1, 2, 3} & set(names(copy))
        assert holds(again, held)
        again.put([make_page(1, 9)])
        again.flush()
        again.close()
        assert holds(open_tier(copy), held | dict([make_page(1, 9)]))
    assert holds(tier, held)


def test_a_moved_record_that_was_written_with_holes_gives_way_to_the_first_one(
    open_tier: Callable[..., NvmeTier], make_page: MakePage, tmp_path: Path
) -> None:
    tier = open_tier(tmp_path / "rows")
    held = fragmented(tier, make_page)
    next(tier.compact())
    copy = shutil.copytree(tmp_path / "rows", tmp_path / "copy")
    raw = bytearray(newest(copy).read_bytes())
    raw[-10] ^= 1
    newest(copy).write_bytes(raw)
    assert holds(open_tier(copy), held)


@pytest.mark.parametrize("change", ["replace", "delete"])
def test_a_page_that_changes_on_its_way_is_not_brought_back(
    open_tier: Callable[..., NvmeTier], make_page: MakePage, tmp_path: Path, change: str
) -> None:
    tier = open_tier(tmp_path)
    held = fragmented(tier, make_page)
    moving = tier.compact()
    next(moving)
    for index in (0, 4, 8):  # the first has been moved, the others have not
        key, blob = make_page(index, 7)
        if change == "replace":
            tier.put([(key, blob)])
            held[key] = blob
        else:
            tier.delete([key])
            del held[key]
    list(moving)
    tier.flush()
    assert holds(tier, held)
    tier.close()
    assert holds(open_tier(tmp_path), held)


def test_a_reader_keeps_its_segment_until_it_has_read(
    layout: PageLayout, make_page: MakePage, tmp_path: Path
) -> None:
    log = SegmentLog(tmp_path, PAGES_PER_SEGMENT * layout.page_bytes, "log")
    pages = [make_page(index) for index in range(PAGES_PER_SEGMENT + 1)]
    for page in pages:
        log.append_page(*page)
    (located,) = log.locate([pages[0][0]])
    assert located is not None
    place, segment = located
    assert len(list(log.move_records(1))) == PAGES_PER_SEGMENT
    assert names(tmp_path) == [2, 3]
    assert segment.read(place.offset, place.size) == pages[0][1]
    assert log.locate([pages[0][0]]) != [located]
    log.close()


def test_a_page_that_rotted_is_not_moved_and_its_segment_stays(
    open_tier: Callable[..., NvmeTier], make_page: MakePage, tmp_path: Path
) -> None:
    tier = open_tier(tmp_path)
    held = fragmented(tier, make_page)
    first = tmp_path / "segment-00000001.kv"
    raw = bytearray(first.read_bytes())
    raw[HEADER_BYTES + 5] ^= 1
    first.write_bytes(raw)
    list(tier.compact())
    assert names(tmp_path)[0] == 1
    assert not {2, 3} & set(names(tmp_path))
    with pytest.raises(CorruptPageError, match="page 0 of session 's'"):
        tier.get([PageKey("s", 0)])
    assert list(tier.compact()) == []
    tier.put([make_page(0)])
    tier.flush()
    assert 1 not in names(tmp_path)
    assert holds(tier, held)


def test_pages_in_doubt_are_not_moved_out_of_it(
    open_tier: Callable[..., NvmeTier], make_page: MakePage, tmp_path: Path
) -> None:
    tier = open_tier(tmp_path)
    fragmented(tier, make_page)
    tier.close()
    third = tmp_path / "segment-00000003.kv"
    raw = bytearray(third.read_bytes())
    raw[len(make_page(0)[1]) + 8] ^= 1
    third.write_bytes(raw)
    again = open_tier(tmp_path)
    assert list(again.compact()) == []
    with pytest.raises(CorruptPageError, match="may be out of date"):
        again.get([PageKey("s", 0)])


def test_a_tier_at_its_limit_empties_segments_before_it_refuses(
    open_tier: Callable[..., NvmeTier], make_page: MakePage, layout: PageLayout, tmp_path: Path
) -> None:
    tier = open_tier(tmp_path, limit_bytes=7 * layout.page_bytes)
    held: Held = {}
    for sequence in range(1, 30):
        key, blob = make_page(sequence % 4, sequence)
        tier.put([(key, blob)])
        held[key] = blob
        assert tier.file_bytes <= 8 * layout.page_bytes
    assert holds(tier, held)


def test_a_tier_empties_segments_by_itself_while_it_is_used(
    open_tier: Callable[..., NvmeTier], make_page: MakePage, layout: PageLayout, tmp_path: Path
) -> None:
    tier = open_tier(tmp_path, compact_in_background=True)
    wrong: list[PageKey] = []
    held: Held = {}

    def use(session: str) -> None:
        for round_ in range(1, 30):
            key, blob = make_page(round_ % 6, round_, session)
            tier.put([(key, blob)])
            if round_ % 5 == 0:
                tier.delete([key])
                held.pop(key, None)
            else:
                held[key] = blob
                wrong.extend([key] * (tier.get([key]) != [blob]))
            if round_ % 3 == 0:
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
    assert holds(tier, held)
    tier.close()
    assert holds(open_tier(tmp_path), held)


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
def test_a_tier_is_a_dictionary_whatever_is_moved(
    steps: list[tuple[str, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("rows")
    tier = NvmeTier(directory, segment_bytes=3000, compact_in_background=False)
    held: Held = {}
    for sequence, (step, index) in enumerate(steps, 1):
        key = PageKey("s", index)
        if step == "put":
            held[key] = sealed(key, sequence)
            tier.put([(key, held[key])])
        elif step == "delete":
            tier.delete([key])
            held.pop(key, None)
        elif step == "flush":
            tier.flush()
        elif step == "move":
            next(tier.compact(0.3), None)
        else:
            tier.close()
            tier = NvmeTier(directory, segment_bytes=3000, compact_in_background=False)
        assert holds(tier, held)
    tier.close()
