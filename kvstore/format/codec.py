"""Rows to bytes and back: as they are, or in eight bits per number.

INT8 is asymmetric quantisation along the axes of KIVI (Liu et al. 2024, section 3.2): keys have outlier channels, so
their scale belongs to a channel; values have none, so theirs belongs to a token. Encoding twice costs twice: rows that
were decoded from INT8 are kept as RAW or by their bytes, never encoded again as if they were exact.
"""

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from kvstore.errors import PageFormatError
from kvstore.format.buffers import empty_rows
from kvstore.format.page import (
    HEADER_BYTES,
    Blob,
    PageHeader,
    PageKey,
    PageLayout,
    page_header,
    require_layout,
    seal_in_place,
)

_STEPS = 255
_SMALLEST_STEP = 2.0**-126
"""The smallest normal step: no division by zero, and no step that a processor may flush to zero."""


class Codec(IntEnum):
    """How a payload holds its rows `[n_layers, 2, n_kv_heads, tokens, head_dim]`; numbers are little-endian."""

    RAW = 0
    """The numbers as they are, in that order."""

    INT8 = 1
    """A code 0..255 per number, which stands for `zero + code * step`.

    A key's zero and step belong to its layer, KV head and channel over the page's tokens, a value's to its layer, KV
    head and token over the channels. A zero is the smallest number of its group in the rows' dtype, a step bfloat16,
    rounded up. So a group of equal numbers comes back exactly, any other number with an error of at most half a step
    (1/510 of its group's range, a step's rounding of 1/128 at most) and the rounding of the rows' dtype. The product
    is exact in float32, so every machine decodes the same bits.

    In order: zeros of keys `[n_layers, n_kv_heads, head_dim]`, zeros of values `[n_layers, n_kv_heads, tokens]`, steps
    of keys, steps of values, codes of keys `[n_layers, n_kv_heads, tokens, head_dim]`, codes of values. At 64 tokens a
    page takes of RAW's bytes in bfloat16 or float16 0.547, 0.531 and 0.523 for a head_dim of 32, 64 and 128; in
    float32 0.285, 0.273 and 0.268.
    """


_CODECS = frozenset(Codec)


def encode_page(
    layout: PageLayout, key: PageKey, sequence: int, rows: Tensor, codec: Codec = Codec.RAW
) -> memoryview:
    """Rows `[n_layers, 2, n_kv_heads, t, head_dim]` (t up to a page) as a sealed page in memory of its own.

    Rows that INT8 cannot hold (one is not finite, or a group's range goes beyond the dtype) stay RAW: the header says
    so.
    """
    parts = _quantised(rows) if codec is Codec.INT8 else None
    if parts is None:
        parts = [rows]
        codec = Codec.RAW
    tokens = rows.shape[3]
    header = page_header(layout, key, sequence, tokens, payload_bytes(layout, tokens, codec), codec)
    record = np.empty(header.record_bytes, dtype=np.uint8).data
    _fill(record[HEADER_BYTES:], parts)
    seal_in_place(header, record)
    return record


def decode_page(layout: PageLayout, header: PageHeader, blob: Blob) -> Tensor:
    """The rows of a page, `[n_layers, 2, n_kv_heads, valid_tokens, head_dim]`; do not write into them.

    The tensor may share memory with `blob`. Raises ForeignPageError for a page of another layout and
    PageFormatError for an unknown codec or a payload whose size does not match its header.
    """
    require_layout(header, layout)
    if header.codec not in _CODECS:
        raise PageFormatError(
            f"unknown page codec {header.codec}; this kvrecall reads {[c.name for c in Codec]}"
        )
    expected = payload_bytes(layout, header.valid_tokens, Codec(header.codec))
    if header.payload_bytes != expected or len(blob) != header.record_bytes:
        raise PageFormatError(
            f"a page of {header.valid_tokens} tokens has a payload of {expected} bytes, "
            f"found {len(blob) - HEADER_BYTES}"
        )
    # torch takes only writable memory without a warning; tiers hand out such memory where they can.
    buffer = bytearray(blob) if memoryview(blob).readonly else blob
    if header.codec == Codec.INT8:
        return _restored(layout, header.valid_tokens, buffer)
    flat = torch.frombuffer(buffer, dtype=layout.dtype, offset=HEADER_BYTES)
    return flat.view(layout.rows_shape(header.valid_tokens))


def payload_bytes(layout: PageLayout, tokens: int, codec: Codec) -> int:
    """Bytes of the payload of a page of `tokens` tokens."""
    if codec is Codec.RAW:
        return tokens * layout.token_bytes
    heads = layout.n_layers * layout.n_kv_heads
    groups = heads * (layout.head_dim + tokens)
    return (
        groups * (layout.dtype.itemsize + torch.bfloat16.itemsize)
        + 2 * heads * tokens * layout.head_dim
    )


def _quantised(rows: Tensor) -> list[Tensor] | None:
    """The parts of INT8's payload, None when the rows do not fit it."""
    sides = [_quantised_along(rows[:, 0], 2), _quantised_along(rows[:, 1], 3)]
    parts = [side for side in sides if side is not None]
    if len(parts) < len(sides):
        return None
    return [part[i] for i in range(3) for part in parts]


def _quantised_along(numbers: Tensor, axis: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """Zeros, steps and codes of `[n_layers, n_kv_heads, tokens, head_dim]`, one zero and step for all of `axis`."""
    zero = numbers.amin(axis, keepdim=True)
    highest = numbers.amax(axis, keepdim=True)
    # In float64, where neither the difference nor a 255th of it can vanish or overflow.
    step = _rounded_up(
        ((highest.double() - zero.double()) / _STEPS).float().clamp_min(_SMALLEST_STEP)
    )
    widest = highest.float() - zero.float()
    largest = (highest.float() + step.float()).to(numbers.dtype)
    if not bool((widest.isfinite() & largest.isfinite()).all()):
        return None
    codes = (numbers.float() - zero.float()).div_(step.float()).round_().clamp_(0, _STEPS)
    return zero, step, codes.to(torch.uint8)


def _rounded_up(steps: Tensor) -> Tensor:
    """Positive float32 to bfloat16, never to less: with a smaller step the code of the largest number is over 255."""
    return (
        (steps.view(torch.int32) + 0xFFFF)
        .bitwise_and_(~0xFFFF)
        .view(torch.float32)
        .to(torch.bfloat16)
    )


def _restored(layout: PageLayout, tokens: int, buffer: Blob) -> Tensor:
    heads = (layout.n_layers, layout.n_kv_heads)
    shapes = [(*heads, 1, layout.head_dim), (*heads, tokens, 1)]
    zeros, offset = _tensors(buffer, HEADER_BYTES, layout.dtype, shapes)
    steps, offset = _tensors(buffer, offset, torch.bfloat16, shapes)
    codes, _ = _tensors(buffer, offset, torch.uint8, [(*heads, tokens, layout.head_dim)] * 2)
    rows = empty_rows(layout.rows_shape(tokens), layout.dtype)
    for side in (0, 1):
        rows[:, side] = codes[side].float().mul_(steps[side].float()).add_(zeros[side].float())
    return rows


def _tensors(
    buffer: Blob, offset: int, dtype: torch.dtype, shapes: Sequence[tuple[int, ...]]
) -> tuple[list[Tensor], int]:
    """Tensors of these shapes, one after the other from `offset` on, and where they end."""
    found = []
    for shape in shapes:
        size = torch.Size(shape).numel()
        found.append(torch.frombuffer(buffer, dtype=dtype, offset=offset, count=size).view(shape))
        offset += size * dtype.itemsize
    return found, offset


def _fill(payload: memoryview, parts: Sequence[Tensor]) -> None:
    """Put tensors one after the other into a payload that they fill."""
    offset = 0
    for part in parts:
        torch.frombuffer(payload, dtype=part.dtype, offset=offset, count=part.numel()).view(
            part.shape
        ).copy_(part)
        offset += part.nbytes
