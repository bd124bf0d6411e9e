"""Page format: the rows of 64 consecutive tokens, all layers and KV heads, with a header.

A page is stored as a header of `HEADER_BYTES` followed by its payload. All numbers are
little-endian. The header checksum covers the header alone, so headers can be verified without
their payloads. The page checksum covers header and payload.

Every format version keeps the magic in bytes 0..3, the version (uint16) in bytes 4..5 and the
header checksum over bytes 0..187 in bytes 188..191. So every program recognises an intact page of
a later version and refuses it (`PageVersionError`) instead of treating it as damaged.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import google_crc32c
import numpy as np

from kvstore.errors import (
    CorruptPageError,
    ForeignPageError,
    PageFormatError,
    PageVersionError,
    RowShapeError,
)

if TYPE_CHECKING:
    # Checks of files and archives read headers without it: it takes seconds to import.
    import torch

MAGIC = b"KVRP"
VERSION = 1
HEADER_BYTES = 192
EPOCH_SHIFT = 32
SESSION_BYTES = 128
DTYPE_CODES = {"float32": 1, "bfloat16": 2, "float16": 3}
"""Codes of the data types in headers, by their names in torch."""

_FIELDS = struct.Struct("<4sHBB16s7HBBIIQ128s")
_CHECKSUM = struct.Struct("<I")
_SEQUENCE = struct.Struct("<Q")
_SEQUENCE_OFFSET = _FIELDS.size - SESSION_BYTES - _SEQUENCE.size
_PAGE_CHECKSUM_OFFSET = HEADER_BYTES - 8
_HEADER_CHECKSUM_OFFSET = HEADER_BYTES - 4

Blob = bytes | bytearray | memoryview
"""A page as bytes, header and payload; immutable once it was put into a tier."""


class RecordKind(IntEnum):
    """Kind of a record. Only pages have a payload; the others belong to the log of an NVMe tier."""

    PAGE = 0
    TOMBSTONE = 1
    SYNC = 2


_KIND_CODES = frozenset(int(kind) for kind in RecordKind)


@dataclass(frozen=True, order=True, slots=True)
class PageKey:
    """Identifies a page: the id of the session that wrote it and its index in that session.

    The page begins at token `index * page_tokens`.
    """

    session: str
    index: int


@dataclass(frozen=True)
class PageLayout:
    """Shape, dtype and model of the rows in one store; rows of two layouts never mix.

    `fingerprint` identifies the model (weights and position encoding) that computed the rows.
    `side_layers`: further layers of a page's rows, which are read by `RowStore.gather_side` alone.
    `latent`: a row is a key that is its own value, and is stored once.

    Raises RowShapeError for a size outside 1..65535, more than 255 side layers, or a dtype other than
    float32, bfloat16 and float16.
    """

    n_layers: int
    n_kv_heads: int
    head_dim: int
    dtype: "torch.dtype"
    fingerprint: str
    page_tokens: int = 64
    side_layers: int = 0
    latent: bool = False

    def __post_init__(self) -> None:
        sizes = (self.n_layers, self.n_kv_heads, self.head_dim, self.page_tokens)
        if not all(0 < size < 1 << 16 for size in sizes):
            raise RowShapeError(f"layout sizes must lie in 1..65535, got {sizes}")
        if not 0 <= self.side_layers < 1 << 8:
            raise RowShapeError(f"a page has at most 255 side layers, got {self.side_layers}")
        if _get_dtype_name(self.dtype) not in DTYPE_CODES:
            raise RowShapeError(f"rows must be float32, bfloat16 or float16, got {self.dtype}")

    @property
    def dtype_code(self) -> int:
        """The data type as headers store it."""
        return DTYPE_CODES[_get_dtype_name(self.dtype)]

    @property
    def page_layers(self) -> int:
        """Layers of a page's rows."""
        return self.n_layers + self.side_layers

    @property
    def parts(self) -> int:
        """Vectors of a row: a key and a value, or a latent alone."""
        return 1 if self.latent else 2

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's rows in a page: of all layers and KV heads."""
        return self.page_layers * self._layer_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's rows without those of side layers."""
        return self.n_layers * self._layer_bytes

    @property
    def _layer_bytes(self) -> int:
        return self.parts * self.n_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def page_bytes(self) -> int:
        """Bytes of a full page, header included."""
        return HEADER_BYTES + self.page_tokens * self.token_bytes

    @cached_property
    def fingerprint_hash(self) -> bytes:
        """Hash of the fingerprint as headers store it, 16 bytes."""
        return blake2b(self.fingerprint.encode(), digest_size=16).digest()

    def rows_shape(self, tokens: int) -> tuple[int, int, int, int, int]:
        """Shape of the rows of `tokens` tokens: side layers are the last ones.

        On the second axis 0 is keys and 1 is values; of latents there is one part.
        """
        return (self.page_layers, self.parts, self.n_kv_heads, tokens, self.head_dim)


@dataclass(frozen=True)
class PageHeader:
    """Decoded header of a page or of a log record.

    `sequence` is the page's version: the writer's epoch, then a count (`first_sequence`). Of two
    copies of a page the one with the larger sequence number is newer.
    """

    key: PageKey
    sequence: int
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
    side_layers: int = 0
    latent: bool = False

    @property
    def epoch(self) -> int:
        """Epoch of the writer."""
        return get_epoch(self.sequence)

    @property
    def record_bytes(self) -> int:
        """Bytes of header and payload."""
        return HEADER_BYTES + self.payload_bytes


def first_sequence(epoch: int) -> int:
    """Lowest sequence number under `epoch`; those of later epochs are all larger."""
    return epoch << EPOCH_SHIFT


def get_epoch(sequence: int) -> int:
    """Epoch under which a page version with this sequence number was written."""
    return sequence >> EPOCH_SHIFT


def build_header(
    layout: PageLayout,
    key: PageKey,
    sequence: int,
    valid_tokens: int,
    payload_bytes: int,
    codec: int,
) -> PageHeader:
    """Build the header of page `key`, whose payload has the rows of `valid_tokens` tokens."""
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
        side_layers=layout.side_layers,
        latent=layout.latent,
        dtype_code=layout.dtype_code,
        codec=codec,
    )


def encode_session_id(session: str) -> bytes:
    """Encode a session id for a header.

    Raises RowShapeError when it is empty or longer than 128 bytes of UTF-8.
    """
    name = session.encode()
    if not 0 < len(name) <= SESSION_BYTES:
        raise RowShapeError(
            f"a session id takes 1 to {SESSION_BYTES} bytes of UTF-8, got {len(name)}: {session!r}"
        )
    return name


def seal(header: PageHeader, payload: Blob = b"") -> bytes:
    """Join header, both checksums and payload into one record."""
    return _build_sealed_header(header, payload) + payload


def seal_in_place(header: PageHeader, record: memoryview) -> None:
    """Write header and checksums into `record`, which already has the payload behind them."""
    record[:HEADER_BYTES] = _build_sealed_header(header, record[HEADER_BYTES:])


def _build_sealed_header(header: PageHeader, payload: Blob) -> bytes:
    # A sync marker belongs to no session: only its session id may be empty.
    session = b"" if header.kind is RecordKind.SYNC else encode_session_id(header.key.session)
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
        len(session),
        header.side_layers,
        header.latent,
        header.key.index,
        header.payload_bytes,
        header.sequence,
        session,
    )
    summed = fields + _CHECKSUM.pack(_checksum(fields, payload))
    return summed + _CHECKSUM.pack(google_crc32c.value(summed))


def _checksum(fields: bytes, payload: Blob) -> int:
    # google_crc32c accepts writable memory only as an array.
    checksum: int = google_crc32c.extend(
        google_crc32c.value(fields), np.frombuffer(payload, dtype=np.uint8)
    )
    return checksum


def parse_header(blob: Blob, offset: int = 0) -> PageHeader:
    """Parse and verify the header at `offset`.

    Raises PageFormatError when there is no header, CorruptPageError when its checksum does not
    match, and PageVersionError when it is intact but of another format version.
    """
    raw = bytes(blob[offset : offset + HEADER_BYTES])
    if len(raw) < HEADER_BYTES or not raw.startswith(MAGIC):
        raise PageFormatError(
            f"no page header: expected {HEADER_BYTES} bytes that start with {MAGIC!r}, "
            f"got {len(raw)} bytes that start with {raw[: len(MAGIC)]!r}"
        )
    if (
        google_crc32c.value(raw[:_HEADER_CHECKSUM_OFFSET])
        != _CHECKSUM.unpack_from(raw, _HEADER_CHECKSUM_OFFSET)[0]
    ):
        raise CorruptPageError(
            "the checksum of a page header does not match; its rows must be computed again"
        )
    fields = _FIELDS.unpack_from(raw)
    if fields[1] != VERSION:
        raise PageVersionError(
            f"found a page of format version {fields[1]}, but this kvrecall reads version "
            f"{VERSION}; use a kvrecall that reads version {fields[1]}, or store pages elsewhere"
        )
    return _to_header(fields)


def _get_dtype_name(dtype: "torch.dtype") -> str:
    return str(dtype).removeprefix("torch.")


def read_sequence(record: Blob) -> int:
    """Read the sequence number of a page that was sealed or verified before; nothing is checked."""
    sequence: int = _SEQUENCE.unpack_from(record, _SEQUENCE_OFFSET)[0]
    return sequence


def _to_header(fields: tuple[Any, ...]) -> PageHeader:
    (
        _,
        _,
        kind_code,
        codec,
        fingerprint_hash,
        dtype_code,
        n_layers,
        n_kv_heads,
        head_dim,
        page_tokens,
        valid_tokens,
        session_bytes,
        side_layers,
        latent,
        index,
        payload_bytes,
        sequence,
        session,
    ) = fields
    if kind_code not in _KIND_CODES:
        raise PageVersionError(
            f"found a record of kind {kind_code}, but this kvrecall reads kinds "
            f"{sorted(_KIND_CODES)}; use the kvrecall that wrote it, or store pages elsewhere"
        )
    return PageHeader(
        PageKey(session[:session_bytes].decode(), index),
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
        RecordKind(kind_code),
        side_layers,
        bool(latent),
    )


def verify_checksum(record: Blob, key: PageKey) -> None:
    """Raise CorruptPageError unless `record` is page `key` and its page checksum matches."""
    check = RecordCheck()
    check.add(memoryview(record))
    check.require(key)


class RecordCheck:
    """Verifies a record piece by piece, while each piece is still in the processor's cache.

    The first piece must contain the whole header; a record shorter than a header never passes.
    """

    def __init__(self) -> None:
        self._computed: int | None = None
        self._expected = 0
        self._identity: tuple[int, int, bytes] | None = None

    def add(self, piece: memoryview) -> None:
        """Add the next piece of the record to the checksum."""
        if self._computed is not None:
            self._computed = google_crc32c.extend(
                self._computed, np.frombuffer(piece, dtype=np.uint8)
            )
        elif len(piece) >= HEADER_BYTES:
            *_, session_bytes, _, _, index, _, sequence, session = _FIELDS.unpack_from(piece)
            self._identity = (index, sequence, session[:session_bytes])
            self._expected = _CHECKSUM.unpack_from(piece, _PAGE_CHECKSUM_OFFSET)[0]
            self._computed = _checksum(bytes(piece[:_PAGE_CHECKSUM_OFFSET]), piece[HEADER_BYTES:])

    def require(self, key: PageKey, sequence: int | None = None) -> None:
        """Raise CorruptPageError unless the pieces were the whole of page `key`.

        With `sequence` the page must have that sequence number too.
        """
        page = f"page {key.index} of session {key.session!r}"
        if self._identity is None or self._computed != self._expected:
            raise CorruptPageError(
                f"{page}: the checksum does not match; its rows must be computed again"
            )
        expected_sequence = self._identity[1] if sequence is None else sequence
        if self._identity != (key.index, expected_sequence, key.session.encode()):
            raise CorruptPageError(
                f"{page}: another record is stored at its location; its rows must be computed again"
            )


def require_layout(header: PageHeader, layout: PageLayout) -> None:
    """Raise ForeignPageError unless the page has the model, shape and dtype of `layout`."""
    expected = (
        layout.fingerprint_hash,
        layout.n_layers,
        layout.n_kv_heads,
        layout.head_dim,
        layout.page_tokens,
        layout.dtype_code,
        layout.side_layers,
        layout.latent,
    )
    found = (
        header.fingerprint_hash,
        header.n_layers,
        header.n_kv_heads,
        header.head_dim,
        header.page_tokens,
        header.dtype_code,
        header.side_layers,
        header.latent,
    )
    if found != expected:
        raise ForeignPageError(
            f"page {header.key.index} of session {header.key.session!r} was written for another "
            f"model or layout (found {found}, expected {expected}); give each model its own "
            "directory"
        )
