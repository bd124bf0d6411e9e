"""Pages describe themselves; damaged, foreign and unknown ones are refused."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import google_crc32c
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvstore.errors import (
    CorruptPageError,
    ForeignPageError,
    KvStoreError,
    PageError,
    PageFormatError,
    PageVersionError,
    RowShapeError,
)
from kvstore.format.codec import decode_page, encode_page
from kvstore.format.page import (
    HEADER_BYTES,
    ID_BYTES,
    Blob,
    PageHeader,
    PageId,
    PageLayout,
    RecordKind,
    parse_header,
    seal,
    verify_checksum,
)

LAYOUT = PageLayout(
    n_layers=2, n_kv_heads=1, head_dim=4, dtype=torch.float32, fingerprint="model A", page_tokens=4
)
ID = bytes(range(ID_BYTES))
ROWS = torch.arange(64.0).view(LAYOUT.rows_shape(4))
PAGE = bytes(encode_page(LAYOUT, ID, ROWS, written_at=1_800_000_000))


def open_page(blob: Blob, layout: PageLayout = LAYOUT) -> Tensor:
    header = parse_header(blob)
    verify_checksum(blob, header.id)
    return decode_page(layout, header, blob)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_round_trip_bit_by_bit(dtype: torch.dtype) -> None:
    layout = replace(LAYOUT, dtype=dtype)
    rows = torch.randn(layout.rows_shape(4), generator=torch.Generator().manual_seed(1)).to(dtype)
    assert torch.equal(open_page(encode_page(layout, ID, rows, written_at=1), layout), rows)


def test_rows_that_are_not_contiguous_are_encoded_in_order() -> None:
    whole = torch.randn(LAYOUT.rows_shape(8), generator=torch.Generator().manual_seed(2))
    rows = whole[:, :, :, 1:8:2]
    assert torch.equal(open_page(encode_page(LAYOUT, ID, rows, written_at=1)), rows)


@pytest.mark.parametrize("tokens", [0, 3, 5])
def test_a_page_is_always_full(tokens: int) -> None:
    with pytest.raises(RowShapeError, match=r"a page has rows \(2, 2, 1, 4, 4\), got"):
        encode_page(LAYOUT, ID, torch.zeros(LAYOUT.rows_shape(tokens)), written_at=1)


def test_a_header_names_its_page_and_when_it_was_written() -> None:
    header = parse_header(PAGE)
    assert (header.id, header.written_at, header.kind) == (ID, 1_800_000_000, RecordKind.PAGE)
    assert header.record_bytes == len(PAGE) == HEADER_BYTES + 4 * LAYOUT.token_bytes


def test_a_log_record_has_an_id_or_what_was_synced_and_no_layout() -> None:
    for header in (
        PageHeader(ID, kind=RecordKind.TOMBSTONE),
        PageHeader(bytes(ID_BYTES), kind=RecordKind.SYNC, synced_bytes=1 << 40),
    ):
        record = seal(header)
        assert (len(record), parse_header(record)) == (HEADER_BYTES, header)


def test_a_page_at_the_place_of_another_one_is_refused() -> None:
    with pytest.raises(CorruptPageError, match="another record is stored at its location"):
        verify_checksum(PAGE, bytes(ID_BYTES))


@given(bit=st.integers(0, 8 * len(PAGE) - 1))
def test_any_flipped_bit_is_refused(bit: int) -> None:
    flipped = bytearray(PAGE)
    flipped[bit // 8] ^= 1 << bit % 8
    with pytest.raises(PageError):
        open_page(bytes(flipped))


@pytest.mark.parametrize("version", [0, 1, 65535])
def test_an_intact_page_of_another_format_version_is_refused(version: int) -> None:
    header = bytearray(PAGE[: HEADER_BYTES - 4])
    header[4:6] = version.to_bytes(2, "little")
    checksum = google_crc32c.value(bytes(header)).to_bytes(4, "little")
    with pytest.raises(
        PageVersionError,
        match=f"found a page of format version {version}, but this kvrecall reads version 3; "
        f"use a kvrecall that reads version {version}",
    ):
        open_page(bytes(header) + checksum + PAGE[HEADER_BYTES:])


def test_an_unknown_kind_of_record_is_refused() -> None:
    header = bytearray(PAGE[: HEADER_BYTES - 4])
    header[6] = 9
    checksum = google_crc32c.value(bytes(header)).to_bytes(4, "little")
    with pytest.raises(PageVersionError, match="record of kind 9, but this kvrecall reads kinds"):
        open_page(bytes(header) + checksum + PAGE[HEADER_BYTES:])


@given(size=st.integers(0, len(PAGE) - 1))
def test_a_truncated_page_is_refused(size: int) -> None:
    with pytest.raises(PageError):
        open_page(PAGE[:size])


@pytest.mark.parametrize(
    "other",
    [
        {"fingerprint": "model B"},
        {"n_layers": 1},
        {"n_kv_heads": 2},
        {"head_dim": 8},
        {"page_tokens": 8},
        {"dtype": torch.float16},
    ],
)
def test_a_page_of_another_model_or_layout_is_refused(other: dict[str, Any]) -> None:
    with pytest.raises(ForeignPageError, match="another model or layout"):
        open_page(PAGE, replace(LAYOUT, **other))


def test_an_unknown_codec_is_refused() -> None:
    header = replace(parse_header(PAGE), codec=9)
    with pytest.raises(PageFormatError, match="codec 9"):
        open_page(seal(header, PAGE[HEADER_BYTES:]))


def test_a_payload_of_another_size_is_refused() -> None:
    header = replace(parse_header(PAGE), payload_bytes=32)
    with pytest.raises(PageFormatError, match="payload"):
        open_page(seal(header, PAGE[HEADER_BYTES : HEADER_BYTES + 32]))


@pytest.mark.parametrize("size", [0, 15, 17])
def test_an_id_of_another_length_is_refused(size: int) -> None:
    with pytest.raises(RowShapeError, match=f"16 bytes, got {size}"):
        seal(PageHeader(bytes(size), kind=RecordKind.TOMBSTONE))


@pytest.mark.parametrize("bad", [{"n_layers": 0}, {"head_dim": 1 << 16}, {"dtype": torch.int64}])
def test_an_impossible_layout_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(KvStoreError):
        replace(LAYOUT, **bad)


def test_decoded_rows_of_a_bytearray_share_its_memory(
    make_page: Callable[..., tuple[PageId, bytes]], layout: PageLayout
) -> None:
    blob = bytearray(make_page(0)[1])
    rows = decode_page(layout, parse_header(blob), blob)
    blob[HEADER_BYTES:] = bytes(len(blob) - HEADER_BYTES)
    assert not rows.any()
