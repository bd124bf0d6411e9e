"""Encryption of pages at rest: AES-256-GCM, with the key of the tenant whose rows they hold.

A page in memory is plain and names its key. Where it lasts, in files, Redis and a bucket, it is
encrypted: the payload is as long as before, and the header has the nonce and the tag. All header fields
but the time of writing are authenticated, so that no page passes for another one.
"""

import secrets
from dataclasses import replace
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from kvstore.errors import CorruptPageError, LockedPageError, RowShapeError
from kvstore.format.page import (
    HEADER_BYTES,
    NO_KEY,
    NONCE_BYTES,
    TAG_BYTES,
    Blob,
    PageHeader,
    pack_fields,
    parse_header,
    seal_in_place,
)

if TYPE_CHECKING:
    # Imported where a page is encrypted: most stores have none.
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.modes import GCM

KEY_BYTES = 32
"""Bytes of a key."""


class PageKeys:
    """The keys that sessions have brought, by their ids. Safe to call from several threads.

    There is one for each tenant whose sessions were open: pages outlive these, and are written later.
    """

    def __init__(self) -> None:
        self._keys: dict[bytes, bytes] = {}

    def add(self, key: bytes) -> bytes:
        """Add a key of KEY_BYTES; return its id. An empty key is none, with the id NO_KEY.

        Raises RowShapeError for a key of another length.
        """
        if not key:
            return NO_KEY
        if len(key) != KEY_BYTES:
            raise RowShapeError(f"a key of pages takes {KEY_BYTES} bytes, got {len(key)}")
        key_id = blake2b(key, digest_size=len(NO_KEY), person=b"kvrecall page id").digest()
        self._keys[key_id] = key
        return key_id

    def encrypt(self, page: Blob) -> Blob:
        """Return a page as it is stored: encrypted if it names a key and is plain, else as it is.

        Raises LockedPageError for a key that is not known.
        """
        header = parse_header(page)
        if header.key_id == NO_KEY or header.is_encrypted:
            return page
        header = replace(header, nonce=secrets.token_bytes(NONCE_BYTES))
        encryptor = self._build_cipher(header).encryptor()
        encryptor.authenticate_additional_data(_authenticated(header))
        stored = np.empty(header.record_bytes, dtype=np.uint8).data
        encryptor.update_into(memoryview(page)[HEADER_BYTES:], stored[HEADER_BYTES:])
        encryptor.finalize()
        seal_in_place(replace(header, tag=encryptor.tag), stored)
        return stored

    def decrypt(self, page: Blob) -> Blob:
        """Return a page as memory has it: plain. One that is plain is returned as it is.

        Raises LockedPageError for a key that is not known, and CorruptPageError for a page that was not
        encrypted with it, or was changed.
        """
        header = parse_header(page)
        if not header.is_encrypted:
            return page
        from cryptography.exceptions import InvalidTag

        decryptor = self._build_cipher(header, header.tag).decryptor()
        decryptor.authenticate_additional_data(_authenticated(header))
        plain = np.empty(header.record_bytes, dtype=np.uint8).data
        try:
            decryptor.update_into(memoryview(page)[HEADER_BYTES:], plain[HEADER_BYTES:])
            decryptor.finalize()
        except InvalidTag as error:
            raise CorruptPageError(
                f"page {header.id.hex()}: it was not encrypted with its key, or was changed; its rows "
                "must be computed again"
            ) from error
        header = replace(header, nonce=bytes(NONCE_BYTES), tag=bytes(TAG_BYTES))
        seal_in_place(header, plain)
        return plain

    def _build_cipher(self, header: PageHeader, tag: bytes | None = None) -> "Cipher[GCM]":
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.algorithms import AES
        from cryptography.hazmat.primitives.ciphers.modes import GCM

        key = self._keys.get(header.key_id)
        if key is None:
            raise LockedPageError(
                f"page {header.id.hex()} is encrypted with key {header.key_id.hex()}, which no session "
                "has brought; its rows must be computed again"
            )
        return Cipher(AES(key), GCM(header.nonce, tag))


def _authenticated(header: PageHeader) -> bytes:
    """Return the fields of a header that must not change. The time of writing may, in an archive."""
    return pack_fields(replace(header, tag=bytes(TAG_BYTES), written_at=0))
