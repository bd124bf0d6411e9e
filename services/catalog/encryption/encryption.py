"""What a catalog encrypts with."""

from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b

from services.catalog.encryption.ciphers import Ciphers, PlainCiphers
from services.catalog.encryption.data_keys import DataKeys, NoDataKeys


@dataclass(frozen=True)
class Encryption:
    """What a catalog encrypts with; the default encrypts nothing.

    `name_digest` names the conversations that histories find sessions by.
    """

    keys: DataKeys = field(default_factory=NoDataKeys)
    tenants: Ciphers = field(default_factory=PlainCiphers)
    sessions: Ciphers = field(default_factory=PlainCiphers)
    conversations: Ciphers = field(default_factory=PlainCiphers)
    name_digest: Callable[[str], str] = str


def hash_digest(secret: bytes, digest: str) -> str:
    """Hash the digest of a conversation under the catalog's secret.

    A digest itself is keyed by the catalog's id: who has both can test guesses of conversations.
    """
    key, person = secret, b"kvr histories"
    return blake2b(digest.encode(), digest_size=32, key=key, person=person).hexdigest()
