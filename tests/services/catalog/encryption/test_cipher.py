"""Ciphers of values: what was sealed comes back at its place, with its key, undamaged, and nowhere else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrecall.domain.errors import CatalogError, DataKeyDeleted
from services.catalog.encryption.cipher import OVERHEAD_BYTES, AesCipher, Cipher
from services.catalog.encryption.ciphers import KEYLESS, PLAIN

CIPHER = AesCipher(bytes(32))


@given(st.binary(), st.text())
def test_an_encrypted_value_comes_back_at_its_place(value: bytes, place: str) -> None:
    sealed = CIPHER.seal(value, place)
    assert CIPHER.open(sealed, place) == value
    assert len(sealed) == len(value) + OVERHEAD_BYTES
    assert len(value) < 8 or value not in sealed


@given(st.text())
def test_an_encrypted_text_comes_back(text: str) -> None:
    sealed = CIPHER.seal_text(text, "here")
    assert isinstance(sealed, bytes)
    assert CIPHER.open_text(sealed, "here") == text


@given(st.text())
def test_a_plain_text_is_read_by_every_cipher(text: str) -> None:
    for cipher in (CIPHER, PLAIN, KEYLESS):
        assert cipher.open_text(text, "here") == text
        assert cipher.open_text(text.encode(), "here") == text
        assert cipher.open(text.encode(), "here") == text.encode()


def test_without_encryption_values_stay_as_they_are() -> None:
    assert PLAIN.seal(b"value", "here") == b"value"
    assert PLAIN.seal_text("text", "here") == "text"


def test_equal_values_are_encrypted_differently() -> None:
    assert CIPHER.seal(b"value", "here") != CIPHER.seal(b"value", "here")


def test_a_value_that_was_put_elsewhere_is_refused() -> None:
    sealed = CIPHER.seal(b"value", "turns.messages 1")
    with pytest.raises(CatalogError, match=r"\(turns.messages 2\) is damaged or was moved"):
        CIPHER.open(sealed, "turns.messages 2")


def test_a_damaged_value_is_never_taken_for_another_one() -> None:
    sealed = CIPHER.seal(b"value", "here")
    for at in range(12, len(sealed)):
        damaged = bytearray(sealed)
        damaged[at] ^= 1
        with pytest.raises(CatalogError, match="authentication tag does not match"):
            CIPHER.open(bytes(damaged), "here")
    with pytest.raises(CatalogError):
        CIPHER.open(sealed[:20], "here")


@pytest.mark.parametrize("cipher", [AesCipher(bytes([1]) * 32), KEYLESS])
def test_a_value_of_a_deleted_key_is_refused_as_such(cipher: Cipher) -> None:
    with pytest.raises(DataKeyDeleted, match="can no longer be decrypted"):
        cipher.open(CIPHER.seal(b"value", "here"), "here")


def test_a_process_without_keys_says_which_setting_it_lacks() -> None:
    with pytest.raises(CatalogError, match="KVRECALL_ENCRYPTION__KEYS_FILE"):
        PLAIN.open(CIPHER.seal(b"value", "here"), "here")


def test_ciphers_of_one_key_are_equal_and_show_none() -> None:
    assert AesCipher(bytes(32)) == CIPHER != AesCipher(bytes([1]) * 32)
    assert hash(AesCipher(bytes(32))) == hash(CIPHER)
    assert "object at" in repr(CIPHER)
