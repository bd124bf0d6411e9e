"""Versions of catalogs: the outcome of opening one, and the refusals of others."""

from dataclasses import dataclass
from pathlib import Path

from kvrecall.domain.errors import CatalogReplaced, CatalogVersion


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


def build_catalog_replaced(location: str, id: str, found: str) -> CatalogReplaced:
    """Build the error for a catalog that is not, or no longer, at `location`; `found` says what is."""
    return CatalogReplaced(
        f"{location} {found}, and this process serves the catalog {id}: nothing is read, written or "
        "deleted meanwhile. Bring its data back, and all goes on by itself. If they are lost, see "
        "'A catalog that vanishes' in docs/operations.md"
    )
