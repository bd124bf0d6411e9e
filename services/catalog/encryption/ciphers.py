"""Ciphers by what they are needed for: a tenant, or one of its sessions or conversations."""

from collections.abc import Callable
from typing import Protocol

from kvrecall.domain.errors import CatalogError, DataKeyDeleted, ServiceError
from services.catalog.encryption.cipher import Cipher, PlainCipher
from services.catalog.encryption.data_keys import StoredDataKeys
from services.catalog.owners import Owners


def _refuse_without_keys() -> ServiceError:
    return CatalogError(
        "the catalog has encrypted values, and this process has no keys: name the file with them in "
        "KVRECALL_ENCRYPTION__KEYS_FILE, the same one on all gateways"
    )


# Of a catalog that encrypts nothing, and of a tenant without a key in one that does.
PLAIN: Cipher = PlainCipher(_refuse_without_keys)
KEYLESS: Cipher = PlainCipher(DataKeyDeleted)


class Ciphers(Protocol):
    """Ciphers by the name of a tenant, of a session, or of a conversation. Raises CatalogError."""

    async def to_read(self, name: str) -> Cipher:
        """Return the cipher that opens values; it may have no key, and opens plain ones then."""
        ...

    async def to_write(self, name: str) -> Cipher:
        """Return the cipher that seals values, whose key is made at need.

        Raises UnknownSession or UnknownConversation.
        """
        ...


class PlainCiphers:
    """The ciphers of a catalog that encrypts nothing."""

    async def to_read(self, name: str) -> Cipher:
        """Return the cipher that leaves values as they are."""
        return PLAIN

    async def to_write(self, name: str) -> Cipher:
        """Return the cipher that leaves values as they are."""
        return PLAIN


class TenantCiphers:
    """The ciphers of tenants."""

    def __init__(self, keys: StoredDataKeys) -> None:
        self._keys = keys

    async def to_read(self, name: str) -> Cipher:
        """Return a tenant's cipher."""
        return await self._keys.find_cipher(name) or KEYLESS

    async def to_write(self, name: str) -> Cipher:
        """Return a tenant's cipher with its key."""
        return await self._keys.get_cipher(name)


class OwnedCiphers:
    """The ciphers of sessions, or of conversations: each is its tenant's."""

    def __init__(
        self, tenants: Ciphers, owners: Owners, build_unknown: Callable[[str], ServiceError]
    ) -> None:
        self._tenants = tenants
        self._owners = owners
        self._build_unknown = build_unknown

    async def to_read(self, name: str) -> Cipher:
        """Return the cipher of a session or conversation; of an unknown one there is nothing to open."""
        tenant = await self._owners.find(name)
        return KEYLESS if tenant is None else await self._tenants.to_read(tenant)

    async def to_write(self, name: str) -> Cipher:
        """Return the cipher of a session or conversation. Raises what `build_unknown` builds."""
        tenant = await self._owners.find(name)
        if tenant is None:
            raise self._build_unknown(name)
        return await self._tenants.to_write(tenant)
