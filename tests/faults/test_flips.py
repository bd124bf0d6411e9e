"""Flipped bits hit pages and headers, and nothing else."""

from pathlib import Path
from random import Random

import pytest
import torch

from benchmarks.faults.flips import flip_in_files, turn_bit
from kvstore.errors import CorruptPageError, PageError
from kvstore.format.codec import encode_page
from kvstore.format.page import HEADER_BYTES, PageKey, PageLayout, parse_header, verify_checksum
from kvstore.tiers.nvme.tier import NvmeTier

PAGES = 6


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of segments with some pages, closed."""
    layout = PageLayout(2, 1, 4, torch.float32, "model", page_tokens=8)
    rows = torch.arange(2 * 2 * 8 * 4, dtype=torch.float32).reshape(layout.rows_shape(8))
    pages = [
        (PageKey("s", index), encode_page(layout, PageKey("s", index), 1, rows))
        for index in range(PAGES)
    ]
    tier = NvmeTier(tmp_path)
    tier.put(pages)
    tier.flush()
    tier.close()
    return tmp_path


def changed_bits(before: bytes, after: bytes) -> list[int]:
    """The offsets of bytes that differ, each as often as bits differ in it."""
    assert len(before) == len(after)
    pairs = enumerate(zip(before, after, strict=True))
    return [offset for offset, (old, new) in pairs for _ in range((old ^ new).bit_count())]


def segment_of(folder: Path) -> Path:
    (segment,) = folder.glob("segment-*.kv")
    return segment


def read_record(data: bytes, start: int) -> None:
    header = parse_header(data, start)
    verify_checksum(data[start : start + header.record_bytes], header.key)


@pytest.mark.parametrize("seed", range(8))
def test_one_bit_of_a_payload_flips_and_its_page_is_known_to_be_lost(
    folder: Path, seed: int
) -> None:
    before = segment_of(folder).read_bytes()
    flip = flip_in_files(folder, "payload", Random(seed))
    assert flip is not None
    assert changed_bits(before, segment_of(folder).read_bytes()) == [flip.offset]
    lost = 0
    tier = NvmeTier(folder)
    for index in range(PAGES):
        try:
            tier.get([PageKey("s", index)])
        except CorruptPageError:
            lost += 1
    tier.close()
    assert lost == 1


@pytest.mark.parametrize("seed", range(8))
def test_one_bit_of_a_header_flips_and_the_header_does_not_hold(folder: Path, seed: int) -> None:
    before = segment_of(folder).read_bytes()
    flip = flip_in_files(folder, "header", Random(seed))
    assert flip is not None
    after = segment_of(folder).read_bytes()
    assert changed_bits(before, after) == [flip.offset]
    start = before.rfind(b"KVRP", 0, flip.offset + 1)
    assert flip.offset - start < HEADER_BYTES
    with pytest.raises(PageError):
        read_record(after, start)


def test_there_is_nothing_to_flip_in_an_empty_folder(tmp_path: Path) -> None:
    assert flip_in_files(tmp_path, "payload", Random(0)) is None


def test_a_bit_turned_twice_is_as_before(folder: Path) -> None:
    segment = segment_of(folder)
    before = segment.read_bytes()
    for _ in range(2):
        turn_bit(segment, 100, 3)
    assert segment.read_bytes() == before
