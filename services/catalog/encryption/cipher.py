"""Ciphers of stored values: AES-256-GCM under a tenant's key, or none.

An encrypted value begins with a prefix that no plain one has: its first byte is in no UTF-8 text, and
all four as a token's id are beyond any vocabulary. Behind it are the id of the data key, a random nonce
and the ciphertext. The tag covers the value's place as well, so a value that was put elsewhere is damaged.
"""

import secrets
from collections.abc import Callable
from typing import Protocol

from kvrecall.domain.errors import CatalogError, DataKeyDeleted, ServiceError
from services.catalog.encryption.wrapping import NONCE_BYTES

_PREFIX = b"\xffKVE"
ID_BYTES = 8
_HEAD_BYTES = len(_PREFIX) + ID_BYTES
OVERHEAD_BYTES = _HEAD_BYTES + NONCE_BYTES + 16
"""The bytes that a value takes more once it is encrypted."""


class Cipher(Protocol):
    """Encrypts and decrypts values of one tenant.

    `place` says where a value lies: the kind of it, and what else of the place never changes. Equal
    ciphers have the same key.
    """

    def __hash__(self) -> int: ...

    @property
    def overhead(self) -> int:
        """The bytes that a value takes more as it is stored."""
        ...

    def seal(self, value: bytes, place: str) -> bytes:
        """Return a value as it is stored."""
        ...

    def seal_text(self, text: str, place: str) -> str | bytes:
        """Return a text as it is stored: as text where it is not encrypted."""
        ...

    def open(self, stored: bytes, place: str) -> bytes:
        """Return what was sealed, or was stored plain.

        Raises DataKeyDeleted if its key is gone, CatalogError if it is damaged or was stored elsewhere.
        """
        ...

    def open_text(self, stored: str | bytes, place: str) -> str:
        """Return the text that was sealed. Raises as `open`."""
        ...


class PlainCipher:
    """A cipher that leaves values as they are, and refuses encrypted ones with the error of `refuse`."""

    def __init__(self, refuse: Callable[[], ServiceError]) -> None:
        self._refuse = refuse

    @property
    def overhead(self) -> int:
        """Return 0."""
        return 0

    def seal(self, value: bytes, place: str) -> bytes:
        """Return the value."""
        return value

    def seal_text(self, text: str, place: str) -> str | bytes:
        """Return the text."""
        return text

    def open(self, stored: bytes, place: str) -> bytes:
        """Return the value; an encrypted one is refused."""
        if is_encrypted(stored):
            raise self._refuse()
        return stored

    def open_text(self, stored: str | bytes, place: str) -> str:
        """Return the text; an encrypted one is refused."""
        return stored if isinstance(stored, str) else self.open(stored, place).decode()


class AesCipher:
    """AES-256-GCM under keys that are derived from a tenant's data key.

    A nonce is random, so one data key encrypts 2**32 values at most: hundreds of millions of turns.
    """

    def __init__(self, data_key: bytes) -> None:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._key_id = _derive(data_key, ID_BYTES, b"kvrecall id of a data key")
        self._aes = AESGCM(_derive(data_key, 32, b"kvrecall values of the catalog"))
        self._head = _PREFIX + self._key_id
        self._invalid_tag = InvalidTag

    def __eq__(self, other: object) -> bool:
        """Return whether both have the same key: sessions are cached by their cipher."""
        return isinstance(other, AesCipher) and self._key_id == other._key_id

    def __hash__(self) -> int:
        return hash(self._key_id)

    @property
    def overhead(self) -> int:
        """Return OVERHEAD_BYTES."""
        return OVERHEAD_BYTES

    def seal(self, value: bytes, place: str) -> bytes:
        """Encrypt a value."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        return self._head + nonce + self._aes.encrypt(nonce, value, self._head + place.encode())

    def seal_text(self, text: str, place: str) -> str | bytes:
        """Encrypt a text."""
        return self.seal(text.encode(), place)

    def open(self, stored: bytes, place: str) -> bytes:
        """Decrypt a value; a plain one is returned. Raises DataKeyDeleted, CatalogError."""
        if not is_encrypted(stored):
            return stored
        if not stored.startswith(self._head):
            raise DataKeyDeleted()
        nonce = stored[_HEAD_BYTES : _HEAD_BYTES + NONCE_BYTES]
        try:
            sealed = stored[_HEAD_BYTES + NONCE_BYTES :]
            return self._aes.decrypt(nonce, sealed, self._head + place.encode())
        except (self._invalid_tag, ValueError):
            raise CatalogError(
                f"a stored value ({place}) is damaged or was moved: its authentication tag does not "
                "match; restore a backup"
            ) from None

    def open_text(self, stored: str | bytes, place: str) -> str:
        """Decrypt a text; a plain one is returned. Raises DataKeyDeleted, CatalogError."""
        return stored if isinstance(stored, str) else self.open(stored, place).decode()


def is_encrypted(stored: bytes) -> bool:
    """Return whether a stored value is encrypted."""
    return stored.startswith(_PREFIX)


def _derive(data_key: bytes, size: int, use: bytes) -> bytes:
    """Derive a key of a use, or an id, from a data key (HKDF-SHA256)."""
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), size, salt=None, info=use).derive(data_key)
