"""Names of a bucket's objects of one page layout.

    {folder}/{page version}/{layout}/{id}    a page, by its id in hexadecimal digits

Pages of another page version or layout have other names, so their stores share a bucket unseen.
"""

from dataclasses import dataclass
from hashlib import blake2b

from kvstore.format.page import ID_BYTES, VERSION, PageId, PageLayout


@dataclass(frozen=True)
class ObjectNames:
    """Object names of one tier; `prefix` and a slash begin all of them."""

    prefix: str

    @staticmethod
    def build(folder: str, layout: PageLayout) -> "ObjectNames":
        """Build the names for a deployment's folder and the layout of its pages."""
        layout_hash = blake2b(repr(layout).encode(), digest_size=12).hexdigest()
        parts = [folder] if folder else []
        return ObjectNames("/".join([*parts, str(VERSION), layout_hash]))

    def page(self, page_id: PageId) -> str:
        """Name of a page's object below the prefix."""
        return page_id.hex()

    def read_id(self, name: str) -> PageId | None:
        """Id of the page that an object below the prefix is; None for another object."""
        try:
            page_id = bytes.fromhex(name)
        except ValueError:
            return None
        return page_id if len(page_id) == ID_BYTES and page_id.hex() == name else None
