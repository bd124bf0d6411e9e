"""Rows to bytes and back. One codec today; another one is a new code with its pair of branches here."""

from enum import IntEnum

import torch
from torch import Tensor

from kvstore.errors import PageFormatError
from kvstore.page import (
    HEADER_BYTES,
    Blob,
    PageHeader,
    PageKey,
    PageLayout,
    page_header,
    require_layout,
    seal,
)


class Codec(IntEnum):
    """How a payload holds its rows."""

    RAW = 0
    """The numbers as they are, little-endian, in the order [n_layers, 2, n_kv_heads, tokens, head_dim]."""


def encode_page(layout: PageLayout, key: PageKey, sequence: int, rows: Tensor) -> bytes:
    """Rows `[n_layers, 2, n_kv_heads, t, head_dim]` (t up to a page) as a sealed page."""
    payload = rows.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return seal(page_header(layout, key, sequence, rows.shape[3], payload, Codec.RAW), payload)


def decode_page(layout: PageLayout, header: PageHeader, blob: Blob) -> Tensor:
    """The rows of a page, `[n_layers, 2, n_kv_heads, valid_tokens, head_dim]`; do not write into them.

    The tensor may share memory with `blob`. Raises ForeignPageError for a page of another layout and
    PageFormatError for an unknown codec or a payload whose size does not match its header.
    """
    require_layout(header, layout)
    if header.codec != Codec.RAW:
        raise PageFormatError(f"unknown page codec {header.codec}; this kvrecall reads {[c.name for c in Codec]}")
    expected = header.valid_tokens * layout.token_bytes
    if header.payload_bytes != expected or len(blob) != header.record_bytes:
        raise PageFormatError(f"a page of {header.valid_tokens} tokens has a payload of {expected} bytes, "
                              f"found {len(blob) - HEADER_BYTES}")  # fmt: skip
    # torch takes only writable memory without a warning; tiers in this process keep bytearrays for that reason.
    buffer = blob if isinstance(blob, bytearray) else bytearray(blob)
    flat = torch.frombuffer(buffer, dtype=layout.dtype, offset=HEADER_BYTES)
    return flat.view(layout.rows_shape(header.valid_tokens))
