"""Encryption of a catalog that is opened: its secret, its data keys, and the operator's keys."""

from collections.abc import Awaitable, Callable
from functools import partial

import structlog

from kvrecall.domain.errors import (
    CatalogError,
    UnknownConversation,
    UnknownSession,
)
from services.catalog.encryption.ciphers import OwnedCiphers, TenantCiphers
from services.catalog.encryption.data_keys import DataKeyStore, StoredDataKeys
from services.catalog.encryption.encryption import Encryption, hash_digest
from services.catalog.encryption.keyring import Keyring
from services.catalog.encryption.wrapping import get_wrapping_name, is_wrapped, unwrap, wrap
from services.catalog.owners import Owners

_USE = "the catalog's secret"
_log = structlog.get_logger("kvrecall.catalog")


def to_stored_secret(keyring: Keyring | None, secret: bytes) -> bytes:
    """Return a catalog's secret as it is stored: wrapped, if there is a keyring."""
    return secret if keyring is None else wrap(keyring, secret, _USE)


def from_stored_secret(keyring: Keyring | None, stored: bytes) -> bytes:
    """Return the secret of a catalog. Raises CatalogError if it is wrapped by a key that is not given."""
    if not is_wrapped(stored):
        return stored
    if keyring is None:
        raise CatalogError(
            f"the catalog is encrypted, with the key {get_wrapping_name(stored)!r}, and no keys are "
            "given; name the file with them in KVRECALL_ENCRYPTION__KEYS_FILE"
        )
    return unwrap(keyring, stored, _USE)


def is_current_secret(keyring: Keyring | None, stored: bytes) -> bool:
    """Return whether a secret is stored as `to_stored_secret` stores it now."""
    if keyring is None:
        return True
    return is_wrapped(stored) and get_wrapping_name(stored) == keyring.current


async def open_encryption(
    keyring: Keyring | None,
    secret: bytes,
    store: DataKeyStore,
    sessions: Owners,
    read_conversation: Callable[[str], Awaitable[str | None]],
) -> Encryption:
    """Open a catalog's encryption, with all data keys under the operator's current key.

    `sessions` finds the tenants of sessions, `read_conversation` that of a conversation. Raises
    CatalogError if a data key is wrapped by a key that is not given.
    """
    if keyring is None:
        return Encryption()
    keys = StoredDataKeys(store, keyring)
    if wrapped := await keys.rewrap():
        _log.info("data keys wrapped anew", keys=wrapped, by=keyring.current)
    tenants = TenantCiphers(keys)
    conversations = Owners(read_conversation)
    return Encryption(
        keys,
        tenants,
        OwnedCiphers(tenants, sessions, UnknownSession),
        OwnedCiphers(tenants, conversations, UnknownConversation),
        partial(hash_digest, secret),
    )
