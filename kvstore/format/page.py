"""Page format: the rows of 64 consecutive tokens, all layers and KV heads, with a header.

A page is stored as a header of `HEADER_BYTES` followed by its payload. All numbers are
little-endian. The header checksum covers the header alone, so headers can be verified without
their payloads. The page checksum covers header and payload.

A page is named by its id, and equal ids are equal pages: a page is always full and never changes.

Every format version keeps the magic in bytes 0..3, the version (uint16) in bytes 4..5 and the
header checksum over bytes 0..187 in bytes 188..191. So every program recognises an intact page of
another version and refuses it (`PageVersionError`) instead of treating it as damaged.

Checksums are over what is stored: encrypted pages are verified without their keys.
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
VERSION = 3
HEADER_BYTES = 192
ID_BYTES = 16
NO_KEY = bytes(16)
"""The id of no key: the page is stored as it is."""
NONCE_BYTES = 12
TAG_BYTES = 16
DTYPE_CODES = {"float32": 1, "bfloat16": 2, "float16": 3}
"""Codes of the data types in headers, by their names in torch."""

_FIELDS = struct.Struct("<4sHBB16s5HBBIQQ16s12s16s16s")
_CHECKSUM = struct.Struct("<I")
_PAGE_CHECKSUM_OFFSET = HEADER_BYTES - 8
_HEADER_CHECKSUM_OFFSET = HEADER_BYTES - 4
_PADDING = bytes(_PAGE_CHECKSUM_OFFSET - _FIELDS.size)

PageId = bytes
"""Id of a page, of ID_BYTES: equal ids are equal pages."""
Blob = bytes | bytearray | memoryview
"""A page as bytes, header and payload; immutable once it was put into a tier."""


class RecordKind(IntEnum):
    """Kind of a record. Only pages have a payload; the others belong to the log of an NVMe tier."""

    PAGE = 0
    TOMBSTONE = 1
    SYNC = 2


_KIND_CODES = frozenset(int(kind) for kind in RecordKind)


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
        """Bytes of a page of raw rows, header included."""
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

    Attributes:
        id: Id of the page; zeros in a sync marker.
        payload_bytes: Bytes behind the header.
        written_at: When the page was encoded, in unix seconds.
        fingerprint_hash: `PageLayout.fingerprint_hash`, as all fields up to `latent`: of a log record
            they are zeros.
        synced_bytes: Of a sync marker: bytes of its file that were on the disk when it was written.
        key_id: Id of the key that the page is encrypted with where it lasts; NO_KEY: none.
        nonce: Of an encrypted payload: number that its key was used with once; else zeros.
        tag: Of an encrypted payload: the tag by which a change of page or header is seen.
    """

    id: PageId
    payload_bytes: int = 0
    written_at: int = 0
    fingerprint_hash: bytes = bytes(16)
    n_layers: int = 0
    n_kv_heads: int = 0
    head_dim: int = 0
    page_tokens: int = 0
    dtype_code: int = 0
    side_layers: int = 0
    latent: bool = False
    codec: int = 0
    kind: RecordKind = RecordKind.PAGE
    synced_bytes: int = 0
    key_id: bytes = NO_KEY
    nonce: bytes = bytes(NONCE_BYTES)
    tag: bytes = bytes(TAG_BYTES)

    @property
    def is_encrypted(self) -> bool:
        """Whether the payload is encrypted: in memory a page is plain, and names its key."""
        return any(self.nonce)

    @property
    def record_bytes(self) -> int:
        """Bytes of header and payload."""
        return HEADER_BYTES + self.payload_bytes


def build_header(
    layout: PageLayout,
    page_id: PageId,
    payload_bytes: int,
    codec: int,
    written_at: int,
    key_id: bytes = NO_KEY,
) -> PageHeader:
    """Build the header of a page whose payload has the rows of `layout.page_tokens` tokens.

    `written_at`: unix seconds.
    """
    return PageHeader(
        id=page_id,
        payload_bytes=payload_bytes,
        written_at=written_at,
        fingerprint_hash=layout.fingerprint_hash,
        n_layers=layout.n_layers,
        n_kv_heads=layout.n_kv_heads,
        head_dim=layout.head_dim,
        page_tokens=layout.page_tokens,
        dtype_code=layout.dtype_code,
        side_layers=layout.side_layers,
        latent=layout.latent,
        codec=codec,
        key_id=key_id,
    )


def seal(header: PageHeader, payload: Blob = b"") -> bytes:
    """Join header, both checksums and payload into one record.

    Raises RowShapeError for an id of another length than ID_BYTES.
    """
    return _build_sealed_header(header, payload) + payload


def seal_in_place(header: PageHeader, record: memoryview) -> None:
    """Write header and checksums into `record`, which already has the payload behind them.

    Raises as `seal`.
    """
    record[:HEADER_BYTES] = _build_sealed_header(header, record[HEADER_BYTES:])


def _build_sealed_header(header: PageHeader, payload: Blob) -> bytes:
    padded = pack_fields(header) + _PADDING
    summed = padded + _CHECKSUM.pack(_checksum(padded, payload))
    return summed + _CHECKSUM.pack(google_crc32c.value(summed))


def pack_fields(header: PageHeader) -> bytes:
    """Pack all fields of a header, without checksums. Raises as `seal`."""
    if len(header.id) != ID_BYTES:
        raise RowShapeError(f"a page id takes {ID_BYTES} bytes, got {len(header.id)}")
    return _FIELDS.pack(
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
        header.side_layers,
        header.latent,
        header.payload_bytes,
        header.written_at,
        header.synced_bytes,
        header.key_id,
        header.nonce,
        header.tag,
        header.id,
    )


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
    if not _is_intact(raw):
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


def _is_intact(header: bytes) -> bool:
    expected: int = _CHECKSUM.unpack_from(header, _HEADER_CHECKSUM_OFFSET)[0]
    return bool(google_crc32c.value(header[:_HEADER_CHECKSUM_OFFSET]) == expected)


def _get_dtype_name(dtype: "torch.dtype") -> str:
    return str(dtype).removeprefix("torch.")


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
        side_layers,
        latent,
        payload_bytes,
        written_at,
        synced_bytes,
        key_id,
        nonce,
        tag,
        page_id,
    ) = fields
    if kind_code not in _KIND_CODES:
        raise PageVersionError(
            f"found a record of kind {kind_code}, but this kvrecall reads kinds "
            f"{sorted(_KIND_CODES)}; use the kvrecall that wrote it, or store pages elsewhere"
        )
    return PageHeader(
        id=page_id,
        payload_bytes=payload_bytes,
        written_at=written_at,
        fingerprint_hash=fingerprint_hash,
        n_layers=n_layers,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        page_tokens=page_tokens,
        dtype_code=dtype_code,
        side_layers=side_layers,
        latent=bool(latent),
        codec=codec,
        kind=RecordKind(kind_code),
        synced_bytes=synced_bytes,
        key_id=key_id,
        nonce=nonce,
        tag=tag,
    )


def verify_checksum(record: Blob, page_id: PageId) -> None:
    """Raise CorruptPageError unless `record` is the page of this id and its page checksum matches."""
    check = RecordCheck()
    check.add(memoryview(record))
    check.require(page_id)


class RecordCheck:
    """Verifies a record piece by piece, while each piece is still in the processor's cache.

    The first piece must contain the whole header; a record without an intact one never passes.
    """

    def __init__(self) -> None:
        self._computed: int | None = None
        self._expected = 0
        self._id: PageId | None = None

    def add(self, piece: memoryview) -> None:
        """Add the next piece of the record to the checksum."""
        if self._computed is None:
            self._computed = self._begin(piece)
        else:
            self._computed = google_crc32c.extend(
                self._computed, np.frombuffer(piece, dtype=np.uint8)
            )

    def _begin(self, piece: memoryview) -> int:
        header = bytes(piece[:HEADER_BYTES])
        if len(header) < HEADER_BYTES or not _is_intact(header):
            return 0
        self._id = _FIELDS.unpack_from(header)[-1]
        self._expected = _CHECKSUM.unpack_from(header, _PAGE_CHECKSUM_OFFSET)[0]
        return _checksum(header[:_PAGE_CHECKSUM_OFFSET], piece[HEADER_BYTES:])

    def require(self, page_id: PageId) -> None:
        """Raise CorruptPageError unless the pieces were the whole of the page of this id."""
        if self._id is None or self._computed != self._expected:
            raise CorruptPageError(
                f"page {page_id.hex()}: the checksum does not match; its rows must be computed again"
            )
        if self._id != page_id:
            raise CorruptPageError(
                f"page {page_id.hex()}: another record is stored at its location; its rows must be "
                "computed again"
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
            f"page {header.id.hex()} was written for another model or layout (found {found}, "
            f"expected {expected}); give each model its own directory"
        )
