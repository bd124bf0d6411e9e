"""Data keys: 32 random bytes for each tenant, stored under a key of the operator's."""

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from services.catalog.encryption.cipher import AesCipher
from services.catalog.encryption.keyring import KEY_BYTES, Keyring
from services.catalog.encryption.wrapping import get_wrapping_name, unwrap, wrap

CACHE_SECONDS = 60.0
"""Within these seconds every process notices that a data key was deleted."""
_TENANTS_KNOWN = 10_000


class DataKeys(Protocol):
    """The data keys of all tenants."""

    async def get_key(self, tenant: str) -> bytes | None:
        """Return a tenant's key of 32 bytes, which is made at need; None where nothing is encrypted.

        Uses derive keys of their own from it (HKDF), as the catalog does for its values. Raises
        CatalogError.
        """
        ...

    async def delete(self, tenant: str) -> bool:
        """Delete a tenant's key, and return whether there was one; its next one is another.

        What was encrypted under it cannot be read any more. Raises CatalogError.
        """
        ...


class DataKeyStore(Protocol):
    """Wrapped data keys by tenant, as a catalog stores them. Raises CatalogError."""

    async def get(self, tenant: str) -> bytes | None:
        """Return a tenant's wrapped key, None if there is none."""
        ...

    async def get_all(self) -> Mapping[str, bytes]:
        """Return all wrapped keys by tenant."""
        ...

    async def add(self, tenant: str, wrapped: bytes) -> bytes:
        """Store a tenant's key unless there is one; return the one that is stored now."""
        ...

    async def replace(self, tenant: str, old: bytes, new: bytes) -> None:
        """Replace a wrapped key by another wrapping of it, unless it has changed or is gone."""
        ...

    async def delete(self, tenant: str) -> bool:
        """Delete a tenant's key, and return whether there was one."""
        ...


class NoDataKeys:
    """The data keys of a catalog that encrypts nothing."""

    async def get_key(self, tenant: str) -> bytes | None:
        """Return None."""
        return None

    async def delete(self, tenant: str) -> bool:
        """Return False: there is none."""
        return False


@dataclass(frozen=True)
class _Known:
    """A tenant's key, its cipher, and when its read began, in monotonic seconds."""

    key: bytes = field(repr=False)
    cipher: AesCipher
    at: float


class StoredDataKeys:
    """Data keys in a catalog's store, unwrapped and kept in memory for CACHE_SECONDS.

    All methods raise CatalogError.
    """

    def __init__(
        self,
        store: DataKeyStore,
        keyring: Keyring,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._keyring = keyring
        self._clock = clock
        self._known: OrderedDict[str, _Known] = OrderedDict()

    async def get_key(self, tenant: str) -> bytes | None:
        """Return a tenant's key, which is made at need."""
        return (await self._get_or_make(tenant)).key

    async def get_cipher(self, tenant: str) -> AesCipher:
        """Return the cipher of a tenant's key, which is made at need."""
        return (await self._get_or_make(tenant)).cipher

    async def find_cipher(self, tenant: str) -> AesCipher | None:
        """Return the cipher of a tenant's key, None if there is none."""
        known = await self._find(tenant)
        return None if known is None else known.cipher

    async def delete(self, tenant: str) -> bool:
        """Delete a tenant's key, and return whether there was one."""
        self._known.pop(tenant, None)
        return await self._store.delete(tenant)

    async def rewrap(self) -> int:
        """Wrap keys under the current operator key that another one has wrapped; count them."""
        count = 0
        for tenant, wrapped in (await self._store.get_all()).items():
            key = unwrap(self._keyring, wrapped, _describe(tenant))
            if get_wrapping_name(wrapped) != self._keyring.current:
                new = wrap(self._keyring, key, _describe(tenant))
                await self._store.replace(tenant, wrapped, new)
                count += 1
        return count

    async def _get_or_make(self, tenant: str) -> _Known:
        found = await self._find(tenant)
        if found is not None:
            return found
        made = wrap(self._keyring, secrets.token_bytes(KEY_BYTES), _describe(tenant))
        began = self._clock()
        # Of two processes that make one at once, both use the one that was stored first.
        return self._learn(tenant, await self._store.add(tenant, made), began)

    async def _find(self, tenant: str) -> _Known | None:
        known = self._known.get(tenant)
        if known is not None and self._clock() < known.at + CACHE_SECONDS:
            self._known.move_to_end(tenant)
            return known
        # Before the read: a deletion that comes after it is noticed in time.
        began = self._clock()
        wrapped = await self._store.get(tenant)
        if wrapped is None:
            self._known.pop(tenant, None)
            return None
        return self._learn(tenant, wrapped, began)

    def _learn(self, tenant: str, wrapped: bytes, at: float) -> _Known:
        key = unwrap(self._keyring, wrapped, _describe(tenant))
        known = _Known(key, AesCipher(key), at)
        self._known[tenant] = known
        self._known.move_to_end(tenant)
        if len(self._known) > _TENANTS_KNOWN:
            self._known.popitem(last=False)
        return known


def _describe(tenant: str) -> str:
    return f"the data key of tenant {tenant!r}"
