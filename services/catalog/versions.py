"""Versions of catalogs: the outcome of opening one, and the refusal of unreadable versions."""

from dataclasses import dataclass
from pathlib import Path

from kvrecall.domain.errors import CatalogVersion


@dataclass(frozen=True)
class CatalogUpgrade:
    """The outcome of opening a catalog.

    `location` is its file or namespace, `found` the version it had (None: it was created),
    `version` the one it has now. `backup` is a copy of the file before.
    """

    location: str
    found: int | None
    version: int
    backup: Path | None = None

    @property
    def upgraded(self) -> bool:
        """True if an older catalog was migrated."""
        return self.found is not None and self.found != self.version


def build_catalog_version(location: str, found: str, version: int, oldest: int) -> CatalogVersion:
    """Build the error for a catalog of a version that this program neither reads nor upgrades."""
    return CatalogVersion(
        f"{location} has catalog version {found}; this kvrecall writes version {version} and "
        f"upgrades from version {oldest}. Run the kvrecall that wrote it or a newer one, "
        "or name another catalog"
    )
