"""Keys that are stored under a key of the operator's: AES-256-GCM, with the operator key's name before it.

`cryptography` is imported by those who encrypt alone.
"""

import secrets

from kvrecall.domain.errors import CatalogError
from services.catalog.encryption.keyring import Keyring

NONCE_BYTES = 12
_MAGIC = b"\xffKVW1"
_ELSEWHERE = (
    "expected the file of keys that this catalog was written with: give back its line, or restore "
    "the file named in KVRECALL_ENCRYPTION__KEYS_FILE"
)


def wrap(keyring: Keyring, key: bytes, use: str) -> bytes:
    """Encrypt a key under the operator's current one; `use` says what it is the key of."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    name = keyring.current.encode()
    nonce = secrets.token_bytes(NONCE_BYTES)
    sealed = AESGCM(keyring.keys[keyring.current]).encrypt(nonce, key, _bind(name, use))
    return _MAGIC + bytes([len(name)]) + name + nonce + sealed


def unwrap(keyring: Keyring, wrapped: bytes, use: str) -> bytes:
    """Decrypt a key. Raises CatalogError if the operator's key is missing or another one."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    name = get_wrapping_name(wrapped)
    key = keyring.keys.get(name)
    if key is None:
        raise CatalogError(
            f"{use} is wrapped by the key {name!r}, which is not given; {_ELSEWHERE}"
        )
    sealed = wrapped[len(_MAGIC) + 1 + len(name) :]
    try:
        return AESGCM(key).decrypt(
            sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], _bind(name.encode(), use)
        )
    except (InvalidTag, ValueError):
        raise CatalogError(
            f"{use} is damaged, or was wrapped by another key of the name {name!r} than the one "
            f"given; {_ELSEWHERE}"
        ) from None


def is_wrapped(stored: bytes) -> bool:
    """Return whether `wrap` made this."""
    return stored.startswith(_MAGIC)


def get_wrapping_name(wrapped: bytes) -> str:
    """Return the name of the operator's key that wrapped a key."""
    first = len(_MAGIC) + 1
    return wrapped[first : first + wrapped[first - 1]].decode(errors="replace")


def _bind(name: bytes, use: str) -> bytes:
    """Build the associated data: a wrapped key is none of another use."""
    return _MAGIC + name + b"\0" + use.encode()
