"""Names of the catalog's keys in Redis.

All keys of a session have one hash tag and so lie in one slot of a cluster.
"""

from dataclasses import dataclass
from hashlib import blake2b
from urllib.parse import quote

from services.catalog.records import IdempotencyKey

# A session's keys, by their index among the KEYS that its scripts are given.
#   META        hash of the session's own values
#   COMMITS     list of the last commits
#   TURNS       list, one entry per turn
#   TOKENS      list, one entry per turn
#   CALLS       hash of tool calls
#   REPAIRS     list
#   EPISODE_SET, SEGMENTS, LABELS, EPISODES, BUILT    hashes of the session's episodes
#   STATES      hash of worker states at the ends of some turns, compressed, by turn
# COMMITS outlives the session.
(
    META,
    COMMITS,
    TURNS,
    TOKENS,
    CALLS,
    REPAIRS,
    EPISODE_SET,
    SEGMENTS,
    LABELS,
    EPISODES,
    BUILT,
    STATES,
) = range(12)
# The index of an idempotency record that is stored in the session's slot.
RECORD = 12

_SUFFIXES = (
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
    ":states",
)


@dataclass(frozen=True)
class Keys:
    """Key names; each begins with `namespace`, which separates deployments."""

    namespace: str

    def get_session_keys(self, session_id: str) -> list[str]:
        """Return all keys of a session, by the indices above."""
        meta = self.get_meta(session_id)
        return [meta + suffix for suffix in _SUFFIXES]

    def get_meta(self, session_id: str) -> str:
        """Return the key that a session has as long as it exists."""
        # Quoted: a brace in a session's name would end the hash tag.
        return f"{self.namespace}:{{{quote(session_id, safe='')}}}"

    def get_claim(self, session_id: str) -> str:
        """Return the key of the claim on a session, in its slot."""
        return f"{self.get_meta(session_id)}:claim"

    def get_record(self, key: IdempotencyKey) -> str:
        """Return the key of an idempotency record.

        It lies in the slot of the session that the request names, if it names one.
        """
        digest = blake2b(
            f"{len(key.scope)} {key.scope}{key.key}".encode(), digest_size=20
        ).hexdigest()
        prefix = self.get_meta(key.session) if key.session else self.namespace
        return f"{prefix}:answer:{digest}"

    def get_sessions(self, tenant: str) -> str:
        """Return the key of a tenant's sessions by creation time."""
        return f"{self.namespace}:sessions:{quote(tenant, safe='')}"

    def get_lengths(self, tenant: str) -> str:
        """Return the key of the tokens in each of a tenant's sessions."""
        return f"{self.namespace}:lengths:{quote(tenant, safe='')}"

    def get_expiring(self, tenant: str) -> str:
        """Return the key of a tenant's sessions by the time of their expiry."""
        return f"{self.namespace}:expiring:{quote(tenant, safe='')}"

    def get_history(self, digest: str) -> str:
        """Return the key of the turn at whose end a conversation has this digest."""
        return f"{self.namespace}:history:{quote(digest, safe='')}"

    def get_memory(self, name: str) -> str:
        """Return the key of a memory's sessions by creation time."""
        return f"{self.namespace}:memory:{quote(name, safe='')}"

    def get_api_key(self, key_id: str) -> str:
        """Return the key of an API key's hash."""
        return f"{self.namespace}:api-key:{quote(key_id, safe='')}"

    def get_response(self, response_id: str, tenant: str) -> str:
        """Return the key of a tenant's stored response."""
        return f"{self.namespace}:response:{quote(tenant, safe='')}:{quote(response_id, safe='')}"

    def get_conversation(self, conversation_id: str) -> str:
        """Return the first key of a conversation; its others begin with it and share its slot."""
        return f"{self.namespace}:conversation:{{{quote(conversation_id, safe='')}}}"

    def get_conversations(self, tenant: str) -> str:
        """Return the key of a tenant's conversations by creation time."""
        return f"{self.namespace}:conversations:{quote(tenant, safe='')}"

    @property
    def api_keys(self) -> str:
        """Key of the ids of all API keys, by their creation."""
        return f"{self.namespace}:api-keys"

    @property
    def tenants(self) -> str:
        """Key of the tenants that may have sessions, by the last time they created one."""
        return f"{self.namespace}:tenants"

    @property
    def expiring(self) -> str:
        """Key of the sessions that expire, by a time before which they do not."""
        return f"{self.namespace}:expiring"

    @property
    def waiting(self) -> str:
        """Key of the pauses, by a time before which they had no event."""
        return f"{self.namespace}:waiting"

    @property
    def deleted(self) -> str:
        """Key of the sessions whose deletion has begun and is not finished."""
        return f"{self.namespace}:deleted"

    @property
    def page_tree(self) -> tuple[str, str, str]:
        """Keys of the tree of page ids, in one slot: pages, dead pages, what sessions end with."""
        first = f"{self.namespace}:{{pages}}"
        return first, f"{first}:dead", f"{first}:ends"

    @property
    def id(self) -> str:
        """Key of the catalog's id."""
        return f"{self.namespace}:id"

    @property
    def secret(self) -> str:
        """Key of the catalog's secret."""
        return f"{self.namespace}:secret"

    @property
    def data_keys(self) -> str:
        """Key of the data keys of all tenants, each wrapped by a key of the operator's."""
        return f"{self.namespace}:data-keys"

    @property
    def version(self) -> str:
        """Key of the schema version."""
        return f"{self.namespace}:version"
