"""Ids of pages: a keyed hash chain over the tokens whose rows they hold.

A row of a full cache is a function of the model and the tokens up to its own. So a page of such rows
has an id that follows from these, and equal ids mean equal rows, whoever computed them. The key is a
tenant's, derived from the catalog's secret: other tenants, and other catalogs, get other ids, and
nobody who does not know the secret can find an id or test a guess.

Rows that also depend on what was evicted before them have a random id: only their session has them.
"""

import secrets
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

PageId = bytes
"""The id of a page. Equal ids are equal pages, whoever wrote them."""
ID_BYTES = 16
"""Bytes of an id: a collision among a billion pages has probability 1.5e-21."""
KEY_BYTES = 32
# The first bit of an id: of random ones it is set.
_RANDOM = 0x80


def derive_row_key(
    secret: bytes, tenant: str, cache_salt: str = "", data_key: bytes | None = None
) -> bytes:
    """Derive the key, of KEY_BYTES, of a tenant's requests with one salt.

    `secret`: the catalog's, of KEY_BYTES. `data_key`: the tenant's, where pages are encrypted: under
    another one they have other ids.
    """
    salts = (tenant.encode(), cache_salt.encode())
    encrypted = () if data_key is None else (_hash(data_key, KEY_BYTES, b"kvrecall rows"),)
    return _hash(secret, KEY_BYTES, b"kvrecall rows", *salts, *encrypted)


def derive_page_key(data_key: bytes | None) -> bytes:
    """Derive the key, of KEY_BYTES, that a tenant's pages are encrypted with; empty without a data key."""
    return b"" if data_key is None else _hash(data_key, KEY_BYTES, b"kvrecall pages")


def make_random_id() -> bytes:
    """Make an id that no other page has, nor ever will."""
    first, *rest = secrets.token_bytes(ID_BYTES)
    return bytes([first | _RANDOM, *rest])


def is_random(page_id: bytes) -> bool:
    """Return whether an id was made by `make_random_id`."""
    return bool(page_id[0] & _RANDOM)


def join_ids(ids: Sequence[bytes]) -> bytes:
    """Concatenate ids, as they are stored and sent."""
    return b"".join(ids)


def split_ids(joined: bytes) -> tuple[bytes, ...]:
    """Split what `join_ids` returned. Raises ValueError for a part of an id."""
    if len(joined) % ID_BYTES:
        raise ValueError(f"ids take {ID_BYTES} bytes each, got {len(joined)} bytes")
    return tuple(joined[at : at + ID_BYTES] for at in range(0, len(joined), ID_BYTES))


def count_common(one: Sequence[object], other: Sequence[object]) -> int:
    """Count the first ids, of pages or tokens, that both have."""
    for index, (ours, theirs) in enumerate(zip(one, other, strict=False)):
        if ours != theirs:
            return index
    return min(len(one), len(other))


@dataclass(frozen=True)
class PageNames:
    """The names that one tenant's pages have in one layout.

    `key`: of `derive_row_key`. `layout`: bytes that stand for all that rows depend on beside the
    tokens: the model, the rows' shape, dtype and codec. `page_tokens`: tokens of a page.
    """

    key: bytes
    layout: bytes
    page_tokens: int

    def extend(
        self, last: bytes | None, token_ids: Sequence[int], *, exact: bool = True
    ) -> Iterator[bytes]:
        """Yield the ids of the pages that follow page `last` (None: a session's first ones).

        `token_ids`: those of whole pages. `exact`: the rows are a full cache's over the session's
        tokens; what follows a page whose rows are not never is. Raises ValueError for a part of a
        page.
        """
        if len(token_ids) % self.page_tokens:
            raise ValueError(f"pages have {self.page_tokens} tokens each, got {len(token_ids)}")
        exact = exact and not (last and is_random(last))
        for first in range(0, len(token_ids), self.page_tokens):
            tokens = token_ids[first : first + self.page_tokens]
            last = self._name(last or self._root, tokens) if exact else make_random_id()
            yield last

    @property
    def _root(self) -> bytes:
        """The id that stands before a session's first page."""
        size = self.page_tokens.to_bytes(4, "little")
        return _hash(self.key, ID_BYTES, b"root", self.layout, size)

    def _name(self, parent: bytes, token_ids: Sequence[int]) -> bytes:
        packed = struct.pack(f"<{len(token_ids)}I", *token_ids)
        first, *rest = _hash(self.key, ID_BYTES, b"page", parent, packed)
        return bytes([first & ~_RANDOM, *rest])


def _hash(key: bytes, size: int, *parts: bytes) -> bytes:
    """Hash parts, each with its length before it, under a key."""
    state = blake2b(key=key, digest_size=size)
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.digest()
