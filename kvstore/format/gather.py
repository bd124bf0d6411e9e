"""Gathering of rows by token position: pure functions that read each page once."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvstore.errors import RowRangeError, RowShapeError
from kvstore.format.buffers import empty_rows, zero_rows
from kvstore.format.page import PageLayout

PageReader = Callable[[Sequence[int]], Iterator[Tensor]]
"""Maps page indices to contiguous rows `[n_layers, 2, n_kv_heads, v, head_dim]`, in order."""


@dataclass(frozen=True, eq=False)
class ReadKeys:
    """Keys of some pages.

    Attributes:
        keys: Per page `[n_layers, n_kv_heads, t, head_dim]`, read-only.
        bytes_read: Bytes of the pages, keys and values, that were read from tiers.
    """

    keys: list[Tensor]
    bytes_read: int


def gather_tokens(layout: PageLayout, positions: Tensor, length: int, read: PageReader) -> Tensor:
    """Gather positions int64 `[m]` as rows `[n_layers, 2, n_kv_heads, m, head_dim]`.

    Raises RowShapeError for positions of another dtype or shape, RowRangeError for a position
    outside 0..length-1.
    """
    _require_positions(positions, 1)
    _require_range(positions, 0, length)
    rows = empty_rows(layout.rows_shape(positions.numel()), layout.dtype)
    pages, members = _group_by_page(positions, layout.page_tokens)
    for index, member, page in zip(pages, members, read(pages), strict=True):
        offsets = positions[member] - index * layout.page_tokens
        for target, source, count in _get_runs(member.tolist(), offsets.tolist()):
            rows.narrow(3, target, count).copy_(page.narrow(3, source, count))
    return rows


def gather_selection(
    layout: PageLayout,
    selection: Sequence[Tensor],
    length: int,
    read: PageReader,
    layers: range,
) -> list[tuple[Tensor, Tensor]]:
    """Gather int64 `[n_kv_heads, m_l]` of each layer as keys, values `[n_kv_heads, m_l, head_dim]`.

    Every KV head has its own positions; position -1 means no row and yields zeros. Latents are both
    keys and values. Raises as `gather_tokens`.
    """
    for positions in selection:
        _require_positions(positions, 2, layout.n_kv_heads)
        _require_range(positions, -1, length)
    if (span := _find_span(selection)) is not None:
        return _gather_span(layout, span, read, layers)
    flat = torch.cat([positions.reshape(-1) for positions in selection])
    shape = (flat.numel(), layout.head_dim)
    keys = zero_rows(shape, layout.dtype)
    values = keys if layout.latent else zero_rows(shape, layout.dtype)
    targets = torch.nonzero(flat >= 0).squeeze(1)
    if not targets.numel():
        return _split(layout, selection, keys, values)
    positions = flat[targets]
    pages, members = _group_by_page(positions, layout.page_tokens)
    by_page = torch.cat(members)
    # As numpy arrays in the order of the pages: a page then costs a few slices.
    lanes = _key_lanes(layout, selection, layers)[targets][by_page].numpy()
    offsets = (positions % layout.page_tokens)[by_page].numpy()
    into = targets[by_page].numpy()
    key_rows = _view_as_rows(keys)
    value_rows = _view_as_rows(values)
    begin = 0
    for member, page in zip(members, read(pages), strict=True):
        of_page = slice(begin, begin + len(member))
        page_rows = _view_as_rows(page)
        stride = page.shape[3]
        sources = lanes[of_page] * stride + offsets[of_page]
        key_rows[into[of_page]] = page_rows[sources]
        if not layout.latent:
            value_rows[into[of_page]] = page_rows[sources + layout.n_kv_heads * stride]
        begin = of_page.stop
    return _split(layout, selection, keys, values)


def split_by_page(start: int, stop: int, page_tokens: int) -> Iterator[tuple[int, int]]:
    """Split positions start..stop-1 at page boundaries: (begin, end) of each piece."""
    for first in range(start - start % page_tokens, stop if start < stop else 0, page_tokens):
        yield max(start, first), min(stop, first + page_tokens)


def _find_span(selection: Sequence[Tensor]) -> range | None:
    """Find the positions of a selection that is the same run of tokens in all layers and heads."""
    if not selection or not selection[0].numel():
        return None
    start = int(selection[0][0, 0])
    span = torch.arange(start, start + selection[0].shape[1])
    if start < 0 or not all(_is_span(positions, span) for positions in selection):
        return None
    return range(start, start + len(span))


def _is_span(positions: Tensor, span: Tensor) -> bool:
    return positions.shape[1] == len(span) and bool((positions == span).all())


def _gather_span(
    layout: PageLayout, span: range, read: PageReader, layers: range
) -> list[tuple[Tensor, Tensor]]:
    """Gather a run of tokens, all of a session that has evicted nothing, layer by layer."""
    rows = gather_run(layout, span, read, layers)
    return list(zip(rows[0], rows[-1], strict=True))


def gather_run(layout: PageLayout, span: range, read: PageReader, layers: range) -> Tensor:
    """Gather a run of tokens of some layers, `[parts, n_layers, n_kv_heads, t, head_dim]`.

    Without an index a row, which takes several times as long.
    """
    shape = (layout.parts, len(layers), layout.n_kv_heads, len(span), layout.head_dim)
    rows = empty_rows(shape, layout.dtype)
    pieces = list(split_by_page(span.start, span.stop, layout.page_tokens))
    pages = [begin // layout.page_tokens for begin, _ in pieces]
    for (begin, end), page in zip(pieces, read(pages), strict=True):
        source = page.narrow(0, layers.start, len(layers)).transpose(0, 1)
        source = source.narrow(3, begin % layout.page_tokens, end - begin)
        rows.narrow(3, begin - span.start, end - begin).copy_(source)
    return rows


def _get_runs(targets: Sequence[int], sources: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Split pairs of indices into runs in which both increase by one: (target, source, count).

    Tokens are mostly contiguous. Copying runs took a thirtieth of the time of indexing in torch.
    """
    begin = 0
    for end in range(1, len(targets) + 1):
        continues = end < len(targets) and (
            targets[end] - targets[begin] == sources[end] - sources[begin] == end - begin
        )
        if not continues:
            yield targets[begin], sources[begin], end - begin
            begin = end


def _view_as_rows(rows: Tensor) -> NDArray[np.void]:
    """View contiguous rows `[..., head_dim]` as `[n]` opaque items, which numpy copies as bytes."""
    flat = rows.view(-1, rows.shape[-1]).view(torch.uint8)
    return flat.numpy().view(f"V{flat.shape[1]}")[:, 0]


def _group_by_page(positions: Tensor, page_tokens: int) -> tuple[list[int], list[Tensor]]:
    """Pages of the positions, ascending, and per page the indices of its positions."""
    page_of_position = positions // page_tokens
    order = torch.argsort(page_of_position, stable=True)
    pages, counts = torch.unique_consecutive(page_of_position[order], return_counts=True)
    ends = torch.cumsum(counts, 0)
    return pages.tolist(), [
        order[begin:end] for begin, end in zip((ends - counts).tolist(), ends.tolist(), strict=True)
    ]


def _key_lanes(layout: PageLayout, selection: Sequence[Tensor], layers: range) -> Tensor:
    """Per flattened position the index `(layer, 0, head)` of its key lane in a page.

    A lane is the rows of all tokens of one KV head; the value lane is `n_kv_heads` lanes further.
    """
    heads = torch.arange(layout.n_kv_heads)
    return torch.cat(
        [
            (heads + layer * layout.parts * layout.n_kv_heads).repeat_interleave(positions.shape[1])
            for layer, positions in zip(layers, selection, strict=True)
        ]
    )


def _split(
    layout: PageLayout, selection: Sequence[Tensor], keys: Tensor, values: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """Split flattened keys and values into one pair per layer."""
    pairs = []
    begin = 0
    for positions in selection:
        shape = (layout.n_kv_heads, positions.shape[1], layout.head_dim)
        end = begin + positions.numel()
        pairs.append((keys[begin:end].view(shape), values[begin:end].view(shape)))
        begin = end
    return pairs


def _require_positions(positions: Tensor, dimensions: int, first: int | None = None) -> None:
    fits = positions.dtype == torch.int64 and positions.dim() == dimensions
    if not fits or (first is not None and positions.shape[0] != first):
        raise RowShapeError(
            f"positions must be int64 with {dimensions} axes"
            + (f", the first of size {first} (KV heads)" if first is not None else "")
            + f"; got {positions.dtype} {list(positions.shape)}"
        )


def _require_range(positions: Tensor, lowest: int, length: int) -> None:
    if positions.numel() and (int(positions.min()) < lowest or int(positions.max()) >= length):
        raise RowRangeError(
            f"positions must lie in {lowest}..{length - 1}, "
            f"got {int(positions.min())}..{int(positions.max())}"
        )
