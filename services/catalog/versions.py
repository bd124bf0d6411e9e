"""The refusals of catalogs of another version, and of other catalogs."""

from kvrecall.domain.errors import CatalogReplaced, CatalogVersion


def build_catalog_version(location: str, found: str, version: int) -> CatalogVersion:
    """Build the error for a catalog whose version is not the one that this program reads."""
    return CatalogVersion(
        f"{location} has catalog version {found}; this kvrecall reads version {version} only. "
        "Run the kvrecall that wrote it, or name another catalog"
    )


def build_catalog_replaced(location: str, id: str, found: str) -> CatalogReplaced:
    """Build the error for a catalog that is not, or no longer, at `location`; `found` says what is."""
    return CatalogReplaced(
        f"{location} {found}, and this process serves the catalog {id}: nothing is read, written or "
        "deleted meanwhile. Bring its data back, and all goes on by itself. If they are lost, see "
        "'A catalog that vanishes' in docs/operations.md"
    )
