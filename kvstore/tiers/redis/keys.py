"""Names of the Redis keys of one namespace and page layout.

    {namespace}:pages:format                          format version of the namespace's keys
    {namespace}:{page version}:{layout}:sessions      sorted set of sessions
    {namespace}:{page version}:{layout}:used          sum of the bytes of all pages
    {namespace}:{page version}:{layout}:used:N        whether that was counted in the last N ms
    {namespace}:{page version}:{layout}:{session}     index of a session (hash)
    {namespace}:{page version}:{layout}:{session}:N   page N of the session

`{session}` is written in braces, a hash tag: all keys of a session are in one slot of a cluster.
Pages of another page version or layout have other names, so their stores share a Redis unseen.
"""

from dataclasses import dataclass
from hashlib import blake2b
from urllib.parse import quote

from kvstore.format.page import VERSION, PageKey, PageLayout

KEY_FORMAT = 1
"""Format version of the keys and of the values that scripts write. A namespace without the marker
key has version 1."""


@dataclass(frozen=True)
class RedisKeys:
    """Key names of one tier; `prefix` begins all but the format marker."""

    format: str
    prefix: str

    @staticmethod
    def build(namespace: str, layout: PageLayout) -> "RedisKeys":
        """Build the names for a deployment's namespace and the layout of its pages."""
        quoted = quote(namespace, safe="")
        prefix = f"{quoted}:{VERSION}:{_hash_layout(layout)}"
        return RedisKeys(format=f"{quoted}:pages:format", prefix=prefix)

    @property
    def sessions(self) -> str:
        """Sorted set of the sessions that have pages."""
        return f"{self.prefix}:sessions"

    @property
    def used(self) -> str:
        """Sum of the bytes of all sessions' pages, as last published."""
        return f"{self.prefix}:used"

    def index(self, session: str) -> str:
        """Index of a session."""
        # Quoted: a brace in a session's id would end the hash tag.
        return f"{self.prefix}:{{{quote(session, safe='')}}}"

    def page(self, key: PageKey) -> str:
        """Page of a session."""
        return f"{self.index(key.session)}:{key.index}"


def _hash_layout(layout: PageLayout) -> str:
    """Hash of model, shape and dtype."""
    return blake2b(repr(layout).encode(), digest_size=12).hexdigest()
