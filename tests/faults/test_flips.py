"""Bit flips hit pages and headers alone."""

from pathlib import Path
from random import Random

import pytest
import torch

from faults.kinds.flips import flip_bit, flip_in_files
from kvstore.errors import CorruptPageError, PageError
from kvstore.format.codec import encode_page
from kvstore.format.page import HEADER_BYTES, ID_BYTES, PageLayout, parse_header, verify_checksum
from kvstore.tiers.nvme.tier import NvmeTier

IDS = [bytes([number]) * ID_BYTES for number in range(6)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of segments with some pages, closed."""
    layout = PageLayout(2, 1, 4, torch.float32, "model", page_tokens=8)
    rows = torch.arange(2 * 2 * 8 * 4, dtype=torch.float32).reshape(layout.rows_shape(8))
    pages = [(page_id, encode_page(layout, page_id, rows, written_at=1)) for page_id in IDS]
    tier = NvmeTier(tmp_path)
    tier.put(pages)
    tier.flush()
    tier.close()
    return tmp_path


def changed_bits(before: bytes, after: bytes) -> list[int]:
    """Offsets of the bytes that differ, one for each different bit."""
    assert len(before) == len(after)
    pairs = enumerate(zip(before, after, strict=True))
    return [offset for offset, (old, new) in pairs for _ in range((old ^ new).bit_count())]


def get_segment(folder: Path) -> Path:
    (segment,) = folder.glob("segment-*.kv")
    return segment


def read_record(data: bytes, start: int) -> None:
    header = parse_header(data, start)
    verify_checksum(data[start : start + header.record_bytes], header.id)


@pytest.mark.parametrize("seed", range(8))
def test_one_flipped_bit_of_a_payload_makes_its_page_corrupt(folder: Path, seed: int) -> None:
    before = get_segment(folder).read_bytes()
    flip = flip_in_files(folder, "payload", Random(seed))
    assert flip is not None
    assert changed_bits(before, get_segment(folder).read_bytes()) == [flip.offset]
    lost = 0
    tier = NvmeTier(folder)
    for page_id in IDS:
        try:
            tier.get([page_id])
        except CorruptPageError:
            lost += 1
    tier.close()
    assert lost == 1


@pytest.mark.parametrize("seed", range(8))
def test_one_flipped_bit_of_a_header_makes_it_invalid(folder: Path, seed: int) -> None:
    before = get_segment(folder).read_bytes()
    flip = flip_in_files(folder, "header", Random(seed))
    assert flip is not None
    after = get_segment(folder).read_bytes()
    assert changed_bits(before, after) == [flip.offset]
    start = before.rfind(b"KVRP", 0, flip.offset + 1)
    assert flip.offset - start < HEADER_BYTES
    with pytest.raises(PageError):
        read_record(after, start)


def test_an_empty_folder_has_no_bit_to_flip(tmp_path: Path) -> None:
    assert flip_in_files(tmp_path, "payload", Random(0)) is None


def test_a_bit_flipped_twice_is_as_before(folder: Path) -> None:
    segment = get_segment(folder)
    before = segment.read_bytes()
    for _ in range(2):
        flip_bit(segment, 100, 3)
    assert segment.read_bytes() == before
