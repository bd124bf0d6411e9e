"""API keys as a catalog keeps them: never the key, only what verifies it."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class KeyRecord:
    """A key of a tenant. Times are Unix seconds.

    `digest` is the HMAC-SHA-256 of the secret part, in hex, and `pepper` the id of the pepper that
    it was made under. A revoked key stays listed.
    """

    id: str
    digest: str
    pepper: str
    tenant: str
    name: str
    scopes: tuple[str, ...]
    created_at: float
    expires_at: float | None = None
    revoked_at: float | None = None
    last_used_at: float | None = None

    def is_usable(self, now: float) -> bool:
        """Return whether the key is neither revoked nor expired."""
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)


class ApiKeys(Protocol):
    """The keys of all tenants. All methods raise CatalogError when the storage fails."""

    async def add(self, record: KeyRecord) -> None:
        """Add a key. Raises CatalogError when its id is taken."""
        ...

    async def get(self, key_id: str) -> KeyRecord | None:
        """Return a key, None if there is none of that id."""
        ...

    async def get_all(self) -> list[KeyRecord]:
        """Return all keys, revoked ones too, oldest first."""
        ...

    async def exist(self) -> bool:
        """Return whether any key was ever made."""
        ...

    async def revoke(self, key_id: str, at: float) -> bool:
        """Revoke a key, and return whether there is one; a second time changes nothing."""
        ...

    async def touch(self, key_id: str, at: float) -> None:
        """Note the time of a key's last use; one that is not there is left alone."""
        ...
