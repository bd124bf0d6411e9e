"""An encrypted page is opened by its key alone, and by no other; a changed one never."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import CorruptPageError, LockedPageError, RowShapeError
from kvstore.format.codec import Codec, decode_page, encode_page
from kvstore.format.encryption import KEY_BYTES, PageKeys
from kvstore.format.page import (
    HEADER_BYTES,
    NO_KEY,
    PageLayout,
    parse_header,
    seal,
    verify_checksum,
)

LAYOUT = PageLayout(
    n_layers=2, n_kv_heads=2, head_dim=4, dtype=torch.float32, fingerprint="model A", page_tokens=8
)
ID = bytes(range(16))
KEY = bytes(range(KEY_BYTES))
ROWS = torch.randn(LAYOUT.rows_shape(8), generator=torch.Generator().manual_seed(0))


def make_page(keys: PageKeys, key: bytes = KEY, codec: Codec = Codec.RAW) -> bytes:
    """A plain page that names a key."""
    key_id = keys.add(key)
    return bytes(encode_page(LAYOUT, ID, ROWS, codec, written_at=7, key_id=key_id))


@pytest.mark.parametrize("codec", Codec)
def test_a_page_is_the_same_after_it_was_encrypted_and_decrypted(codec: Codec) -> None:
    keys = PageKeys()
    page = make_page(keys, codec=codec)
    stored = keys.encrypt(page)
    assert parse_header(stored).is_encrypted
    assert len(stored) == len(page)
    assert bytes(keys.decrypt(stored)) == page


def test_an_encrypted_page_has_nothing_of_its_rows_and_is_verified_without_a_key() -> None:
    keys = PageKeys()
    page = make_page(keys)
    stored = bytes(keys.encrypt(page))
    pieces = [page[at : at + 8] for at in range(HEADER_BYTES, len(page), 8)]
    assert not any(piece in stored for piece in pieces)
    verify_checksum(stored, ID)


def test_a_page_is_encrypted_differently_each_time() -> None:
    keys = PageKeys()
    page = make_page(keys)
    first, second = (bytes(keys.encrypt(page)) for _ in range(2))
    assert first[HEADER_BYTES:] != second[HEADER_BYTES:]
    assert parse_header(first).nonce != parse_header(second).nonce


def test_a_page_without_a_key_and_one_that_is_encrypted_are_left_as_they_are() -> None:
    keys = PageKeys()
    plain = make_page(keys, b"")
    assert parse_header(plain).key_id == NO_KEY
    assert keys.encrypt(plain) is plain
    assert keys.decrypt(plain) is plain
    stored = keys.encrypt(make_page(keys))
    assert keys.encrypt(stored) is stored


def test_a_page_whose_key_nobody_brought_is_locked() -> None:
    stored = PageKeys()
    page = stored.encrypt(make_page(stored))
    others = PageKeys()
    others.add(bytes(KEY_BYTES))
    with pytest.raises(LockedPageError, match=f"page {ID.hex()} is encrypted with key"):
        others.decrypt(page)


def test_an_encrypted_page_is_not_decoded() -> None:
    keys = PageKeys()
    stored = keys.encrypt(make_page(keys))
    with pytest.raises(LockedPageError, match="decrypt it before"):
        decode_page(LAYOUT, parse_header(stored), stored)


@given(st.integers(HEADER_BYTES, LAYOUT.page_bytes - 1), st.integers(1, 255))
def test_a_changed_payload_is_refused_though_its_checksum_is_right(at: int, change: int) -> None:
    keys = PageKeys()
    stored = bytearray(keys.encrypt(make_page(keys)))
    header = parse_header(stored)
    stored[at] ^= change
    with pytest.raises(CorruptPageError, match="was not encrypted with its key, or was changed"):
        keys.decrypt(seal(header, bytes(stored[HEADER_BYTES:])))


@pytest.mark.parametrize(
    "change",
    [
        {"id": bytes(16)},
        {"codec": Codec.INT8},
        {"fingerprint_hash": bytes(16)},
        {"n_layers": 1},
        {"nonce": bytes(11) + b"x"},
    ],
)
def test_a_page_does_not_pass_for_another_one(change: dict[str, Any]) -> None:
    keys = PageKeys()
    stored = bytes(keys.encrypt(make_page(keys)))
    header = replace(parse_header(stored), **change)
    with pytest.raises(CorruptPageError):
        keys.decrypt(seal(header, stored[HEADER_BYTES:]))


def test_the_time_of_writing_may_change() -> None:
    keys = PageKeys()
    stored = bytes(keys.encrypt(make_page(keys)))
    header = replace(parse_header(stored), written_at=8)
    plain = keys.decrypt(seal(header, stored[HEADER_BYTES:]))
    assert torch.equal(decode_page(LAYOUT, parse_header(plain), plain), ROWS)


@pytest.mark.parametrize("size", [1, KEY_BYTES - 1, KEY_BYTES + 1])
def test_a_key_of_another_length_is_refused(size: int) -> None:
    with pytest.raises(RowShapeError, match=f"takes 32 bytes, got {size}"):
        PageKeys().add(bytes(size))
