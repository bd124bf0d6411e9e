"""Page codecs: rows as raw numbers, or quantised to eight bits per number.

INT8 is asymmetric quantisation along the axes of KIVI (Liu et al. 2024, section 3.2): keys have
outlier channels, so they are quantised per channel; values have none, so they are quantised per
token. The quantisation error adds up when rows are encoded twice: rows decoded from INT8 are stored
as RAW or by their encoded bytes, never encoded again.
"""

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from kvstore.errors import LockedPageError, PageFormatError, RowShapeError
from kvstore.format.buffers import empty_rows
from kvstore.format.page import (
    HEADER_BYTES,
    NO_KEY,
    Blob,
    PageHeader,
    PageId,
    PageLayout,
    build_header,
    require_layout,
    seal_in_place,
)

_STEPS = 255
# The smallest normal bfloat16: avoids division by zero and steps that a processor flushes to zero.
_SMALLEST_STEP = 2.0**-126


class Codec(IntEnum):
    """Encoding of payload rows `[n_layers, 2, n_kv_heads, tokens, head_dim]`, little-endian."""

    RAW = 0
    """The numbers in their own dtype, in that order."""

    INT8 = 1
    """A code 0..255 per number, decoded as `zero + code * step`.

    Keys share a zero and a step per layer, KV head and channel over the page's tokens; values share
    them per layer, KV head and token over the channels. A zero is the smallest number of its group
    in the rows' dtype; a step is bfloat16, rounded up. So a group of equal numbers is decoded
    exactly, and any other number with an error of at most half a step (1/510 of its group's range,
    plus the step's rounding of at most 1/128) and the rounding of the rows' dtype. The product is
    exact in float32, so every machine decodes the same bits.

    Payload in order: zeros of keys `[n_layers, n_kv_heads, head_dim]`, zeros of values
    `[n_layers, n_kv_heads, tokens]`, steps of keys, steps of values, codes of keys
    `[n_layers, n_kv_heads, tokens, head_dim]`, codes of values. Latents are keys
    alone. A page of 64 tokens takes 0.547, 0.531 and 0.523 of RAW's bytes in bfloat16 or float16
    with a head_dim of 32, 64 and 128; in float32 it takes 0.285, 0.273 and 0.268.
    """


_CODECS = frozenset(Codec)


def encode_page(
    layout: PageLayout,
    page_id: PageId,
    rows: Tensor,
    codec: Codec = Codec.RAW,
    *,
    written_at: int,
    key_id: bytes = NO_KEY,
) -> memoryview:
    """Encode rows `[n_layers, 2, n_kv_heads, page_tokens, head_dim]` as a sealed page.

    The page has its own memory. Rows that INT8 cannot represent (a number is not finite, or a
    group's range exceeds the dtype) are encoded as RAW; the header names the codec that was used.
    `written_at`: unix seconds. `key_id`: of the key that it is encrypted with where it lasts. Raises
    RowShapeError for rows of another shape, and for an id of another length than `ID_BYTES`.
    """
    if tuple(rows.shape) != layout.rows_shape(layout.page_tokens):
        raise RowShapeError(
            f"a page has rows {layout.rows_shape(layout.page_tokens)}, got {tuple(rows.shape)}"
        )
    parts = _quantise(rows) if codec is Codec.INT8 else None
    if parts is None:
        parts = [rows]
        codec = Codec.RAW
    size = payload_bytes(layout, codec)
    header = build_header(layout, page_id, size, codec, written_at, key_id)
    record = np.empty(header.record_bytes, dtype=np.uint8).data
    _write_tensors(record[HEADER_BYTES:], parts)
    seal_in_place(header, record)
    return record


def decode_page(layout: PageLayout, header: PageHeader, blob: Blob) -> Tensor:
    """Decode a page into read-only rows `[n_layers, 2, n_kv_heads, page_tokens, head_dim]`.

    The tensor may share memory with `blob`. Raises ForeignPageError for a page of another layout,
    LockedPageError for an encrypted one, and PageFormatError for an unknown codec or a payload whose
    size does not match its header.
    """
    require_layout(header, layout)
    if header.is_encrypted:
        raise LockedPageError(
            f"page {header.id.hex()} is encrypted; decrypt it before it is decoded"
        )
    if header.codec not in _CODECS:
        raise PageFormatError(
            f"found a page with codec {header.codec}, but this kvrecall reads "
            f"{[f'{codec.name} ({codec.value})' for codec in Codec]}; use the kvrecall that wrote "
            "it, or store pages elsewhere"
        )
    expected = payload_bytes(layout, Codec(header.codec))
    if header.payload_bytes != expected or len(blob) != header.record_bytes:
        raise PageFormatError(
            f"a page must have a payload of {expected} bytes, got {len(blob) - HEADER_BYTES}; its "
            "rows must be computed again"
        )
    # torch warns about read-only memory; tiers return writable memory where they can.
    buffer = bytearray(blob) if memoryview(blob).readonly else blob
    if header.codec == Codec.INT8:
        return _dequantise(layout, buffer)
    flat = torch.frombuffer(buffer, dtype=layout.dtype, offset=HEADER_BYTES)
    return flat.view(layout.rows_shape(layout.page_tokens))


def payload_bytes(layout: PageLayout, codec: Codec) -> int:
    """Size in bytes of a page's payload."""
    if codec is Codec.RAW:
        return layout.page_tokens * layout.token_bytes
    heads = layout.page_layers * layout.n_kv_heads
    groups = heads * (layout.head_dim + (0 if layout.latent else layout.page_tokens))
    return (
        groups * (layout.dtype.itemsize + torch.bfloat16.itemsize)
        + layout.parts * heads * layout.page_tokens * layout.head_dim
    )


def _quantise(rows: Tensor) -> list[Tensor] | None:
    """Quantise rows into the parts of an INT8 payload; None when INT8 cannot represent them."""
    sides = [_quantise_along(rows[:, side], 2 + side) for side in range(rows.shape[1])]
    parts = [side for side in sides if side is not None]
    if len(parts) < len(sides):
        return None
    return [part[i] for i in range(3) for part in parts]


def _quantise_along(numbers: Tensor, axis: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """Quantise `[n_layers, n_kv_heads, tokens, head_dim]` into zeros, steps and codes.

    All numbers along `axis` share one zero and one step.
    """
    zero = numbers.amin(axis, keepdim=True)
    highest = numbers.amax(axis, keepdim=True)
    # In float64 neither the difference nor a 255th of it underflows or overflows.
    step = _round_up(
        ((highest.double() - zero.double()) / _STEPS).float().clamp_min(_SMALLEST_STEP)
    )
    widest = highest.float() - zero.float()
    largest = (highest.float() + step.float()).to(numbers.dtype)
    if not bool((widest.isfinite() & largest.isfinite()).all()):
        return None
    codes = (numbers.float() - zero.float()).div_(step.float()).round_().clamp_(0, _STEPS)
    return zero, step, codes.to(torch.uint8)


def _round_up(steps: Tensor) -> Tensor:
    """Round positive float32 up to bfloat16: a smaller step would need codes over 255."""
    return (
        (steps.view(torch.int32) + 0xFFFF)
        .bitwise_and_(~0xFFFF)
        .view(torch.float32)
        .to(torch.bfloat16)
    )


def _dequantise(layout: PageLayout, buffer: Blob) -> Tensor:
    tokens = layout.page_tokens
    heads = (layout.page_layers, layout.n_kv_heads)
    shapes = [(*heads, 1, layout.head_dim), (*heads, tokens, 1)][: layout.parts]
    zeros, offset = _read_tensors(buffer, HEADER_BYTES, layout.dtype, shapes)
    steps, offset = _read_tensors(buffer, offset, torch.bfloat16, shapes)
    shape = (*heads, tokens, layout.head_dim)
    codes, _ = _read_tensors(buffer, offset, torch.uint8, [shape] * layout.parts)
    rows = empty_rows(layout.rows_shape(tokens), layout.dtype)
    for side in range(layout.parts):
        rows[:, side] = codes[side].float().mul_(steps[side].float()).add_(zeros[side].float())
    return rows


def _read_tensors(
    buffer: Blob, offset: int, dtype: torch.dtype, shapes: Sequence[tuple[int, ...]]
) -> tuple[list[Tensor], int]:
    """Read consecutive tensors of these shapes from `offset`; also return the end offset."""
    tensors = []
    for shape in shapes:
        size = torch.Size(shape).numel()
        tensors.append(torch.frombuffer(buffer, dtype=dtype, offset=offset, count=size).view(shape))
        offset += size * dtype.itemsize
    return tensors, offset


def _write_tensors(payload: memoryview, parts: Sequence[Tensor]) -> None:
    """Write tensors into a payload of their total size, one after the other."""
    offset = 0
    for part in parts:
        flat = torch.frombuffer(payload, dtype=part.dtype, offset=offset, count=part.numel())
        flat.view(part.shape).copy_(part)
        offset += part.nbytes
