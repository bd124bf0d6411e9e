"""Keys under a key of the operator's: opened by that one alone, for the use that they were wrapped for."""

import pytest

from kvrecall.domain.errors import CatalogError
from services.catalog.encryption.keyring import Keyring, make_line, parse_keyring
from services.catalog.encryption.wrapping import get_wrapping_name, is_wrapped, unwrap, wrap

OLD, NEW = make_line("old"), make_line("new")
KEY = bytes(range(32))


def test_a_wrapped_key_is_opened_by_the_key_that_wrapped_it_and_says_its_name() -> None:
    wrapped = wrap(parse_keyring(OLD), KEY, "the key of a test")
    assert is_wrapped(wrapped)
    assert not is_wrapped(KEY)
    assert KEY not in wrapped
    assert get_wrapping_name(wrapped) == "old"
    both = parse_keyring(f"{NEW}\n{OLD}")
    assert unwrap(both, wrapped, "the key of a test") == KEY
    assert get_wrapping_name(wrap(both, KEY, "the key of a test")) == "new"


def test_a_key_whose_operator_key_is_not_given_is_refused_by_name() -> None:
    wrapped = wrap(parse_keyring(OLD), KEY, "the key of a test")
    with pytest.raises(CatalogError, match="wrapped by the key 'old', which is not given"):
        unwrap(parse_keyring(NEW), wrapped, "the key of a test")


def test_another_key_of_the_same_name_is_refused() -> None:
    wrapped = wrap(parse_keyring(OLD), KEY, "the key of a test")
    with pytest.raises(CatalogError, match="another key of the name 'old'"):
        unwrap(parse_keyring(make_line("old")), wrapped, "the key of a test")


def test_a_key_is_none_of_another_use() -> None:
    keyring: Keyring = parse_keyring(OLD)
    wrapped = wrap(keyring, KEY, "the data key of tenant 'ann'")
    with pytest.raises(CatalogError, match="the data key of tenant 'bob' is damaged"):
        unwrap(keyring, wrapped, "the data key of tenant 'bob'")


def test_a_damaged_key_is_refused_wherever_a_bit_flipped() -> None:
    keyring = parse_keyring(OLD)
    wrapped = wrap(keyring, KEY, "the key of a test")
    for at in range(5, len(wrapped)):
        damaged = bytearray(wrapped)
        damaged[at] ^= 1
        with pytest.raises(CatalogError):
            unwrap(keyring, bytes(damaged), "the key of a test")
    with pytest.raises(CatalogError):
        unwrap(keyring, wrapped[:12], "the key of a test")
