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
    Blob,
    PageHeader,
    PageKey,
    PageLayout,
    RecordKind,
    parse_header,
    seal,
    verify_checksum,
)

LAYOUT = PageLayout(
    n_layers=2, n_kv_heads=1, head_dim=4, dtype=torch.float32, fingerprint="model A", page_tokens=4
)
KEY = PageKey("tenant/söhne", 7)
PAGE = bytes(encode_page(LAYOUT, KEY, 12, torch.arange(48.0).view(LAYOUT.rows_shape(3))))


def open_page(blob: Blob, layout: PageLayout = LAYOUT) -> Tensor:
    header = parse_header(blob)
    verify_checksum(blob, header.key)
    return decode_page(layout, header, blob)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 3, 4])
def test_rows_round_trip_bit_by_bit(dtype: torch.dtype, tokens: int) -> None:
    layout = replace(LAYOUT, dtype=dtype)
    rows = torch.randn(layout.rows_shape(tokens), generator=torch.Generator().manual_seed(1)).to(
        dtype
    )
    assert torch.equal(open_page(encode_page(layout, KEY, 1, rows), layout), rows)


def test_rows_that_are_not_contiguous_are_encoded_in_order() -> None:
    whole = torch.randn(LAYOUT.rows_shape(4), generator=torch.Generator().manual_seed(2))
    assert torch.equal(
        open_page(encode_page(LAYOUT, KEY, 1, whole[:, :, :, 1:3])), whole[:, :, :, 1:3]
    )


def test_header_names_page_version_and_valid_tokens() -> None:
    header = parse_header(PAGE)
    assert (header.key, header.sequence, header.valid_tokens, header.kind) == (
        KEY,
        12,
        3,
        RecordKind.PAGE,
    )
    assert header.record_bytes == len(PAGE) == HEADER_BYTES + 3 * LAYOUT.token_bytes


@given(bit=st.integers(0, 8 * len(PAGE) - 1))
def test_any_flipped_bit_is_refused(bit: int) -> None:
    flipped = bytearray(PAGE)
    flipped[bit // 8] ^= 1 << bit % 8
    with pytest.raises(PageError):
        open_page(bytes(flipped))


@pytest.mark.parametrize("version", [0, 2, 65535])
def test_an_intact_page_of_another_format_version_is_refused(version: int) -> None:
    header = bytearray(PAGE[: HEADER_BYTES - 4])
    header[4:6] = version.to_bytes(2, "little")
    checksum = google_crc32c.value(bytes(header)).to_bytes(4, "little")
    with pytest.raises(
        PageVersionError,
        match=f"found a page of format version {version}, but this kvrecall reads version 1; "
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


def test_a_payload_that_does_not_match_its_tokens_is_refused() -> None:
    header = replace(parse_header(PAGE), valid_tokens=2)
    with pytest.raises(PageFormatError, match="payload"):
        open_page(seal(header, PAGE[HEADER_BYTES:]))


@pytest.mark.parametrize("name", ["", "x" * 129, "ü" * 65])
def test_a_session_id_that_does_not_fit_a_header_is_refused(name: str) -> None:
    with pytest.raises(RowShapeError, match="1 to 128 bytes"):
        seal(PageHeader(PageKey(name, 0), 1, 0, 0, kind=RecordKind.TOMBSTONE))


@pytest.mark.parametrize("bad", [{"n_layers": 0}, {"head_dim": 1 << 16}, {"dtype": torch.int64}])
def test_an_impossible_layout_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(KvStoreError):
        replace(LAYOUT, **bad)


def test_decoded_rows_of_a_bytearray_share_its_memory(
    make_page: Callable[..., tuple[PageKey, bytes]], layout: PageLayout
) -> None:
    blob = bytearray(make_page(0)[1])
    rows = decode_page(layout, parse_header(blob), blob)
    blob[HEADER_BYTES:] = bytes(len(blob) - HEADER_BYTES)
    assert not rows.any()
