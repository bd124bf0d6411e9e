"""Keys: their form, their digest, and their removal from text."""

import pytest

from services.access.keys import digest_key, get_pepper_id, make_key, parse_key, redact_keys


def test_a_key_has_a_prefix_an_id_and_256_random_bits() -> None:
    key = make_key()
    assert key.text == f"kvr-{key.id}{key.secret}"
    assert (len(key.id), len(key.secret)) == (8, 43)
    assert parse_key(key.text) == key
    assert len({make_key().text for _ in range(100)}) == 100


@pytest.mark.parametrize("change", [" ", "\n", "x", "é"])
def test_another_form_is_no_key(change: str) -> None:
    text = make_key().text
    for other in (text + change, change + text, text[:-1] + change * 2, text[:-1], ""):
        assert parse_key(other) is None


def test_a_digest_is_of_the_whole_key_under_its_pepper() -> None:
    key, other = make_key(), make_key()
    digests = {
        digest_key(key, b"one"),
        digest_key(key, b"two"),
        digest_key(other, b"one"),
        digest_key(type(key)(other.id, key.secret), b"one"),
    }
    assert len(digests) == 4
    assert digest_key(key, b"one") in digests
    assert get_pepper_id(b"one") != get_pepper_id(b"two")


def test_a_keys_secret_is_in_no_text() -> None:
    key = make_key()
    for text in (f"key {key.text}!", f'"{key.text}"', f"/v1/{key.text}/x", f"{key.text[:30]}..."):
        redacted = redact_keys(text)
        assert key.id in redacted
        assert key.secret[:16] not in redacted
    assert key.secret not in repr(key)
    assert redact_keys("kvr-models and s_0123456789abcdef") == "kvr-models and s_0123456789abcdef"
