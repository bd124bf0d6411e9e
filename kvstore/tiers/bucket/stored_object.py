"""What a bucket says of an object without its content."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StoredObject:
    """An object of a bucket.

    Attributes:
        name: Name below the client's prefix.
        size: Bytes.
        stored_at: When it was stored, in unix seconds.
    """

    name: str
    size: int
    stored_at: int
