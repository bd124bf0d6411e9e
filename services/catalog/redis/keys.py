"""What the catalog's keys in Redis are called. All keys of a session have one hash tag: they lie in one slot."""

from dataclasses import dataclass
from hashlib import blake2b
from urllib.parse import quote

from services.catalog.base import IdempotencyKey

(
    META,
    COMMITS,
    TURNS,
    TOKENS,
    CALLS,
    REPAIRS,
    SET,
    SEGMENTS,
    LABELS,
    EPISODES,
    BUILT,
    OWNERS,
    SHARERS,
    GONE,
) = range(14)
"""A session's keys, by their place among those that every script of the session is given.

META is a hash of the session's own values, COMMITS the list of the last commits, TURNS and TOKENS have one entry per
turn, CALLS is a hash of tool calls, REPAIRS a list. SET, SEGMENTS, LABELS, EPISODES and BUILT are hashes of its
episodes. OWNERS says where the session may be counted as one that shares, SHARERS who shares its own pages; with GONE,
which says what is still to be done after its deletion, they outlive it.
"""
ANSWER = 14
"""The place of an answer that is remembered with a session."""

_NAMES = (
    "",
    ":commits",
    ":turns",
    ":tokens",
    ":calls",
    ":repairs",
    ":set",
    ":segments",
    ":labels",
    ":episodes",
    ":built",
    ":owners",
    ":sharers",
    ":gone",
)


@dataclass(frozen=True)
class Keys:
    """The names, each beginning with `namespace`, which keeps deployments apart."""

    namespace: str

    def session(self, session: str) -> list[str]:
        """All keys of a session, by the places above."""
        meta = self.meta(session)
        return [meta + name for name in _NAMES]

    def meta(self, session: str) -> str:
        """The key that a session has as long as it exists."""
        # Quoted: a brace in a session's name would end the hash tag.
        return f"{self.namespace}:{{{quote(session, safe='')}}}"

    def claim(self, session: str) -> str:
        """Who works on a session, in its slot."""
        return f"{self.meta(session)}:claim"

    def answer(self, key: IdempotencyKey) -> str:
        """An answer; in the slot of the session that its request names, if it names one."""
        digest = blake2b(
            f"{len(key.scope)} {key.scope}{key.key}".encode(), digest_size=20
        ).hexdigest()
        return (
            f"{self.meta(key.session)}:answer:{digest}"
            if key.session
            else f"{self.namespace}:answer:{digest}"
        )

    def sessions(self, tenant: str) -> str:
        """A tenant's sessions, by age."""
        return f"{self.namespace}:sessions:{quote(tenant, safe='')}"

    def lengths(self, tenant: str) -> str:
        """How many tokens each of a tenant's sessions has."""
        return f"{self.namespace}:lengths:{quote(tenant, safe='')}"

    def prefix(self, digest: str) -> str:
        """What a session with this digest said first."""
        return f"{self.namespace}:prefix:{quote(digest, safe='')}"

    @property
    def tenants(self) -> str:
        """Every tenant that ever had a session."""
        return f"{self.namespace}:tenants"

    @property
    def waiting(self) -> str:
        """Pauses, by a time before which nothing was heard of them."""
        return f"{self.namespace}:waiting"

    @property
    def deleted(self) -> str:
        """Deleted sessions of which there is still something to do or to keep."""
        return f"{self.namespace}:deleted"

    @property
    def leftovers(self) -> str:
        """Deleted sessions of which the workers may have pages that nobody needs."""
        return f"{self.namespace}:leftovers"

    @property
    def version(self) -> str:
        """Which version of these names and values is used."""
        return f"{self.namespace}:version"
