"""Files of the operator's keys: the first one is in use, and what is wrong in one is said without showing a key."""

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.catalog.encryption.keyring import KEY_BYTES, Keyring, make_line, parse_keyring

KEY = base64.b64encode(bytes(range(KEY_BYTES))).decode()


def test_the_first_key_of_a_file_is_the_current_one() -> None:
    keyring = parse_keyring(f"# keys of the house\n\n2026-11 {KEY}\n{make_line('2026-05')}\n")
    assert keyring.current == "2026-11"
    assert list(keyring.keys) == ["2026-11", "2026-05"]
    assert keyring.keys["2026-11"] == bytes(range(KEY_BYTES))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "there is no key in it"),
        ("# nothing\n", "there is no key in it"),
        (f"\n{KEY}", "line 2 is no key; expected NAME BASE64"),
        (f"a {KEY} b", "line 1 is no key"),
        (f"a/b {KEY}", "line 1 is no key"),
        (f"{'n' * 65} {KEY}", "line 1 is no key"),
        (f"a {KEY}\na {KEY}", "line 2 has a second key 'a'"),
        (f"a {KEY[:-4]}!!!!", "line 1: key 'a' is not in base64"),
        ("a c2hvcnQ=", "line 1: key 'a' has 5 bytes; expected NAME BASE64, with 32 random bytes"),
    ],
)
def test_a_malformed_file_is_refused_with_its_line_and_what_was_expected(
    text: str, said: str
) -> None:
    with pytest.raises(ValueError, match=said) as refusal:
        parse_keyring(text)
    assert KEY[:8] not in str(refusal.value)


@given(st.text())
def test_no_file_is_taken_for_keys_that_it_does_not_have(text: str) -> None:
    try:
        keyring = parse_keyring(text)
    except ValueError:
        return
    assert all(len(key) == KEY_BYTES for key in keyring.keys.values())


def test_each_line_has_a_key_of_its_own() -> None:
    assert make_line("a") != make_line("a")
    with pytest.raises(ValueError, match="1 to 64 letters"):
        make_line("two words")


def test_a_keyring_shows_names_and_no_keys() -> None:
    keyring = Keyring("a", {"a": b"secret" * 5})
    assert "secret" not in repr(keyring)
