"""API keys of the in-memory catalog."""

from dataclasses import replace

from kvrecall.domain.errors import CatalogError
from services.catalog.api_keys.base import KeyRecord


class InMemoryApiKeys:
    """The keys of all tenants."""

    def __init__(self) -> None:
        self._records: dict[str, KeyRecord] = {}

    async def add(self, record: KeyRecord) -> None:
        """Add a key. Raises CatalogError when its id is taken."""
        if record.id in self._records:
            raise CatalogError(f"there is a key {record.id!r} already")
        self._records[record.id] = record

    async def get(self, key_id: str) -> KeyRecord | None:
        """Return a key, None if there is none of that id."""
        return self._records.get(key_id)

    async def get_all(self) -> list[KeyRecord]:
        """Return all keys, oldest first."""
        return sorted(self._records.values(), key=lambda record: (record.created_at, record.id))

    async def exist(self) -> bool:
        """Return whether any key was ever made."""
        return bool(self._records)

    async def revoke(self, key_id: str, at: float) -> bool:
        """Revoke a key, and return whether there is one."""
        record = self._records.get(key_id)
        if record is not None and record.revoked_at is None:
            self._records[key_id] = replace(record, revoked_at=at)
        return record is not None

    async def touch(self, key_id: str, at: float) -> None:
        """Note the time of a key's last use."""
        if key_id in self._records:
            self._records[key_id] = replace(self._records[key_id], last_used_at=at)
