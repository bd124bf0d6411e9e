"""A page: the rows of up to 64 consecutive tokens, all layers and KV heads, and the header that describes it.

A page as bytes is a header of `HEADER_BYTES` followed by its payload. Integers and numbers are little-endian.
The header's own checksum covers the header, so that headers can be trusted without reading payloads; the
page's checksum covers header and payload.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from hashlib import blake2b
from typing import Any

import google_crc32c
import numpy as np
import torch

from kvstore.errors import CorruptPageError, ForeignPageError, PageFormatError, RowShapeError

MAGIC = b"KVRP"
VERSION = 1
HEADER_BYTES = 192
EPOCH_SHIFT = 32
SESSION_BYTES = 128
DTYPE_CODES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}

_FIELDS = struct.Struct("<4sHBB16s7H2xIIQ128s")
_CHECKSUM = struct.Struct("<I")
_SEQUENCE = struct.Struct("<Q")
_SEQUENCE_AT = _FIELDS.size - SESSION_BYTES - _SEQUENCE.size
_PAGE_CHECKSUM_AT = HEADER_BYTES - 8
_HEADER_CHECKSUM_AT = HEADER_BYTES - 4

Blob = bytes | bytearray | memoryview
"""A page as bytes: header and payload. Treated as immutable once it was handed to a tier."""


class RecordKind(IntEnum):
    """What a header announces. Only pages have a payload; the other two are records of a tier's log."""

    PAGE = 0
    TOMBSTONE = 1
    SYNC = 2


@dataclass(frozen=True, order=True, slots=True)
class PageKey:
    """Names a page: the session's id and the page's index in it (its first token is `index * page_tokens`)."""

    session: str
    index: int


@dataclass(frozen=True)
class PageLayout:
    """Shape, dtype and origin of the rows in one store. Rows of two layouts never mix.

    `fingerprint` identifies the model (weights and position encoding) that computed the rows.
    """

    n_layers: int
    n_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    fingerprint: str
    page_tokens: int = 64

    def __post_init__(self) -> None:
        sizes = (self.n_layers, self.n_kv_heads, self.head_dim, self.page_tokens)
        if not all(0 < size < 1 << 16 for size in sizes):
            raise RowShapeError(f"layout sizes must lie in 1..65535, got {sizes}")
        if self.dtype not in DTYPE_CODES:
            raise RowShapeError(f"rows must be float32, bfloat16 or float16, got {self.dtype}")

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's rows: keys and values of all layers and KV heads."""
        return self.n_layers * 2 * self.n_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def page_bytes(self) -> int:
        """Bytes of a full page, header included."""
        return HEADER_BYTES + self.page_tokens * self.token_bytes

    @cached_property
    def fingerprint_hash(self) -> bytes:
        """16 bytes that stand for the fingerprint in headers."""
        return blake2b(self.fingerprint.encode(), digest_size=16).digest()

    def rows_shape(self, tokens: int) -> tuple[int, int, int, int, int]:
        """Shape of the rows of `tokens` tokens; index 0 of the second axis is keys, 1 is values."""
        return (self.n_layers, 2, self.n_kv_heads, tokens, self.head_dim)


@dataclass(frozen=True)
class PageHeader:
    """What a page says about itself."""

    key: PageKey
    sequence: int
    """Of two copies of one page the larger one is the newer: the writer's epoch, then a count (`first_sequence`)."""
    valid_tokens: int
    payload_bytes: int
    fingerprint_hash: bytes = bytes(16)
    n_layers: int = 0
    n_kv_heads: int = 0
    head_dim: int = 0
    page_tokens: int = 0
    dtype_code: int = 0
    codec: int = 0
    kind: RecordKind = RecordKind.PAGE

    @property
    def epoch(self) -> int:
        """Under which the page was written."""
        return self.sequence >> EPOCH_SHIFT

    @property
    def record_bytes(self) -> int:
        """Bytes of header and payload together."""
        return HEADER_BYTES + self.payload_bytes


def first_sequence(epoch: int) -> int:
    """The lowest sequence number of pages that are written under `epoch`: later epochs' are all larger."""
    return epoch << EPOCH_SHIFT


def page_header(
    layout: PageLayout,
    key: PageKey,
    sequence: int,
    valid_tokens: int,
    payload_bytes: int,
    codec: int,
) -> PageHeader:
    """Describe a payload: the encoded rows of the first `valid_tokens` tokens of page `key`."""
    return PageHeader(
        key=key,
        sequence=sequence,
        valid_tokens=valid_tokens,
        payload_bytes=payload_bytes,
        fingerprint_hash=layout.fingerprint_hash,
        n_layers=layout.n_layers,
        n_kv_heads=layout.n_kv_heads,
        head_dim=layout.head_dim,
        page_tokens=layout.page_tokens,
        dtype_code=DTYPE_CODES[layout.dtype],
        codec=codec,
    )


def session_name_bytes(session: str) -> bytes:
    """The session's id as a header stores it. Raises RowShapeError when it is empty or over 128 UTF-8 bytes."""
    name = session.encode()
    if not 0 < len(name) <= SESSION_BYTES:
        raise RowShapeError(
            f"a session id takes 1 to {SESSION_BYTES} bytes of UTF-8, got {len(name)}: {session!r}"
        )
    return name


def seal(header: PageHeader, payload: Blob = b"") -> bytes:
    """Header, both checksums and payload as one record."""
    return _sealed_header(header, payload) + payload


def seal_in_place(header: PageHeader, record: memoryview) -> None:
    """Write header and checksums before the payload, which is in its place in `record` already."""
    record[:HEADER_BYTES] = _sealed_header(header, record[HEADER_BYTES:])


def _sealed_header(header: PageHeader, payload: Blob) -> bytes:
    # A sync marker belongs to no session, so it is the one record whose name may be empty.
    name = b"" if header.kind is RecordKind.SYNC else session_name_bytes(header.key.session)
    fields = _FIELDS.pack(
        MAGIC,
        VERSION,
        header.kind,
        header.codec,
        header.fingerprint_hash,
        header.dtype_code,
        header.n_layers,
        header.n_kv_heads,
        header.head_dim,
        header.page_tokens,
        header.valid_tokens,
        len(name),
        header.key.index,
        header.payload_bytes,
        header.sequence,
        name,
    )
    summed = fields + _CHECKSUM.pack(_checksum(fields, payload))
    return summed + _CHECKSUM.pack(google_crc32c.value(summed))


def _checksum(fields: bytes, payload: Blob) -> int:
    # The checksum's library takes memory that may change only as an array.
    checksum: int = google_crc32c.extend(
        google_crc32c.value(fields), np.frombuffer(payload, dtype=np.uint8)
    )
    return checksum


def parse_header(blob: Blob, offset: int = 0) -> PageHeader:
    """Read the header at `offset`.

    Raises PageFormatError when there is none of this version, CorruptPageError when its checksum does not hold.
    """
    raw = bytes(blob[offset : offset + HEADER_BYTES])
    if len(raw) < HEADER_BYTES or not raw.startswith(MAGIC):
        raise PageFormatError(
            f"no page header: expected {HEADER_BYTES} bytes that start with {MAGIC!r}"
        )
    if (
        google_crc32c.value(raw[:_HEADER_CHECKSUM_AT])
        != _CHECKSUM.unpack_from(raw, _HEADER_CHECKSUM_AT)[0]
    ):
        raise CorruptPageError(
            "the checksum of a page header does not hold; its rows must be computed again"
        )
    fields = _FIELDS.unpack_from(raw)
    if fields[1] != VERSION:
        raise PageFormatError(
            f"page format version {fields[1]}, but this kvrecall reads version {VERSION}"
        )
    return _header_from(fields)


def sequence_of(record: Blob) -> int:
    """The sequence number of a page that was just sealed or verified, without a look at anything else."""
    sequence: int = _SEQUENCE.unpack_from(record, _SEQUENCE_AT)[0]
    return sequence


def _header_from(fields: tuple[Any, ...]) -> PageHeader:
    (
        _,
        _,
        kind,
        codec,
        fingerprint_hash,
        dtype_code,
        n_layers,
        n_kv_heads,
        head_dim,
        page_tokens,
        valid_tokens,
        name_bytes,
        index,
        payload_bytes,
        sequence,
        name,
    ) = fields
    session = name[:name_bytes].decode()
    return PageHeader(
        PageKey(session, index),
        sequence,
        valid_tokens,
        payload_bytes,
        fingerprint_hash,
        n_layers,
        n_kv_heads,
        head_dim,
        page_tokens,
        dtype_code,
        codec,
        RecordKind(kind),
    )


def verify_checksum(record: Blob, key: PageKey) -> None:
    """Raise CorruptPageError unless the record is the page's and its checksum over header and payload holds."""
    check = RecordCheck()
    check.add(memoryview(record))
    check.require(key)


class RecordCheck:
    """Verifies a record piece by piece, while each piece is still in the processor's cache.

    The first piece holds the whole header, if the record does.
    """

    def __init__(self) -> None:
        self._found: int | None = None
        self._expected = 0
        self._named: tuple[int, int, bytes] | None = None

    def add(self, piece: memoryview) -> None:
        """Take the next piece."""
        if self._found is not None:
            self._found = google_crc32c.extend(self._found, np.frombuffer(piece, dtype=np.uint8))
        elif len(piece) >= HEADER_BYTES:
            *_, name_bytes, index, _, sequence, name = _FIELDS.unpack_from(piece)
            self._named = (index, sequence, name[:name_bytes])
            self._expected = _CHECKSUM.unpack_from(piece, _PAGE_CHECKSUM_AT)[0]
            self._found = _checksum(bytes(piece[:_PAGE_CHECKSUM_AT]), piece[HEADER_BYTES:])

    def require(self, key: PageKey, sequence: int | None = None) -> None:
        """Raise CorruptPageError unless all of the page's record was there, in the version of `sequence` if given."""
        page = f"page {key.index} of session {key.session!r}"
        if self._found is None or self._named is None or self._found != self._expected:
            raise CorruptPageError(
                f"{page}: the checksum does not hold; its rows must be computed again"
            )
        if self._named != (
            key.index,
            self._named[1] if sequence is None else sequence,
            key.session.encode(),
        ):
            raise CorruptPageError(
                f"{page}: another record lies in its place; its rows must be computed again"
            )


def require_layout(header: PageHeader, layout: PageLayout) -> None:
    """Raise ForeignPageError unless the page was written under `layout`: same model, shape and dtype."""
    expected = (
        layout.fingerprint_hash,
        layout.n_layers,
        layout.n_kv_heads,
        layout.head_dim,
        layout.page_tokens,
        DTYPE_CODES[layout.dtype],
    )
    found = (
        header.fingerprint_hash,
        header.n_layers,
        header.n_kv_heads,
        header.head_dim,
        header.page_tokens,
        header.dtype_code,
    )
    if found != expected:
        raise ForeignPageError(
            f"page {header.key.index} of session {header.key.session!r} was written for another model or layout "
            f"(found {found}, expected {expected}); give each model a directory of its own"
        )
