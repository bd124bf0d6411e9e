"""API keys: their form, the digest that verifies them, and their removal from text.

A key is `kvr-`, 8 characters of id, 43 of secret (256 random bits). So many bits need no slow hash:
the digest is an HMAC-SHA-256 under the operator's pepper, without which a stolen catalog does not
even verify a guess.
"""

import hashlib
import hmac
import re
import secrets
import string
from dataclasses import dataclass

PREFIX = "kvr-"
_ID_LENGTH = 8
_ID_LETTERS = string.ascii_lowercase + string.digits
_SECRET_BYTES = 32
_KEY = re.compile(r"kvr-([a-z0-9]{8})([A-Za-z0-9_-]{43})")
_KEY_IN_TEXT = re.compile(r"kvr-([a-z0-9]{8})[A-Za-z0-9_-]{16,}")
# A shorter pepper could be guessed from a stolen catalog and a key.
MIN_PEPPER_BYTES = 16


@dataclass(frozen=True)
class ApiKey:
    """A key as its owner holds it: the id may be shown, the secret never."""

    id: str
    secret: str

    def __repr__(self) -> str:
        return f"ApiKey({self.id!r})"

    @property
    def text(self) -> str:
        """The whole key, as it is shown once and sent with each request."""
        return f"{PREFIX}{self.id}{self.secret}"


def make_key() -> ApiKey:
    """Make a random key."""
    id = "".join(secrets.choice(_ID_LETTERS) for _ in range(_ID_LENGTH))
    return ApiKey(id, secrets.token_urlsafe(_SECRET_BYTES))


def parse_key(text: str) -> ApiKey | None:
    """Return the key of a text, None if it has not the form of one."""
    match = _KEY.fullmatch(text)
    return None if match is None else ApiKey(match[1], match[2])


def digest_key(key: ApiKey, pepper: bytes) -> str:
    """Return the digest of a key, in hex, for the catalog."""
    return hmac.new(pepper, f"{key.id}{key.secret}".encode(), hashlib.sha256).hexdigest()


def get_pepper_id(pepper: bytes) -> str:
    """Return a short name of a pepper, by which a gateway sees that a key was made under another."""
    return hmac.new(pepper, b"kvrecall pepper id", hashlib.sha256).hexdigest()[:8]


def redact_keys(text: str) -> str:
    """Replace the secrets of all keys in a text, also of cut ones; the ids stay."""
    return _KEY_IN_TEXT.sub(r"kvr-\1...", text)
