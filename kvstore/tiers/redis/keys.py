"""Names of the Redis keys of one namespace and page layout.

    {namespace}:{page version}:{layout}:p:{id}         a page, by its id in hexadecimal digits
    {namespace}:{page version}:{layout}:used           sum of the bytes of all pages
    {namespace}:{page version}:{layout}:used:counted   while the last count of that sum is recent

No name has a hash tag: the pages of a session spread over a cluster. Pages of another page version or
layout have other names, so their stores share a Redis unseen.
"""

from dataclasses import dataclass
from hashlib import blake2b
from urllib.parse import quote

from kvstore.format.page import VERSION, PageId, PageLayout


@dataclass(frozen=True)
class RedisKeys:
    """Key names of one tier; `prefix` begins all of them."""

    prefix: str

    @staticmethod
    def build(namespace: str, layout: PageLayout) -> "RedisKeys":
        """Build the names for a deployment's namespace and the layout of its pages."""
        layout_hash = blake2b(repr(layout).encode(), digest_size=12).hexdigest()
        # Quoted: neither a hash tag nor a pattern.
        return RedisKeys(f"{quote(namespace, safe='')}:{VERSION}:{layout_hash}")

    @property
    def used(self) -> str:
        """Sum of the bytes of all pages, as last published."""
        return f"{self.prefix}:used"

    @property
    def counted(self) -> str:
        """Exists for a while after a count of the sum."""
        return f"{self.used}:counted"

    @property
    def pages(self) -> str:
        """Pattern of the names of all pages."""
        return f"{self.prefix}:p:*"

    def page(self, page_id: PageId) -> str:
        """Name of a page."""
        return f"{self.prefix}:p:{page_id.hex()}"

    def read_id(self, name: str) -> PageId:
        """Id of the page that a name of `page` is of."""
        return bytes.fromhex(name.rpartition(":")[2])
