"""The signature of a session archive, by which an installation knows its own files again."""

import hashlib
import hmac
from dataclasses import dataclass, field
from enum import StrEnum


class Signature(StrEnum):
    """Who has signed a file, in words."""

    NONE = "unsigned"
    OWN = "signed by this installation"
    FOREIGN = "signed by another installation"


@dataclass(frozen=True)
class ArchiveKey:
    """The key of an installation's archives, which follows from the pepper of its API keys."""

    pepper: bytes = field(repr=False)

    @property
    def name(self) -> str:
        """A short name of the key, which tells nothing of it."""
        return self._digest(b"kvrecall archive key name").hex()[:16]

    def sign(self, digest: bytes) -> bytes:
        """Return the HMAC-SHA-256, 32 bytes, of a file's digest."""
        return hmac.digest(self._digest(b"kvrecall archive signature"), digest, hashlib.sha256)

    def verify(self, digest: bytes, signature: bytes) -> bool:
        """Return whether this key has made the signature."""
        return hmac.compare_digest(self.sign(digest), signature)

    def _digest(self, purpose: bytes) -> bytes:
        return hmac.digest(self.pepper, purpose, hashlib.sha256)
