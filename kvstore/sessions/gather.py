"""Rows out of pages by token position: pure functions over a reader of pages, each page read once."""

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
"""Page indices -> their rows `[n_layers, 2, n_kv_heads, v, head_dim]`, contiguous, in the order asked for."""


@dataclass(frozen=True, eq=False)
class ReadKeys:
    """Keys of some pages, per page `[n_layers, n_kv_heads, t, head_dim]`, not to be written into.

    bytes_read: of the pages, keys and values, that tiers had to deliver.
    """

    keys: list[Tensor]
    bytes_read: int


def gather_tokens(layout: PageLayout, positions: Tensor, length: int, read: PageReader) -> Tensor:
    """Positions int64 `[m]` -> rows `[n_layers, 2, n_kv_heads, m, head_dim]`, the same tokens everywhere."""
    _require_positions(positions, 1)
    _require_range(positions, 0, length)
    rows = empty_rows(layout.rows_shape(positions.numel()), layout.dtype)
    touched, members = _by_page(positions, layout.page_tokens)
    for index, member, page in zip(touched, members, read(touched), strict=True):
        offsets = positions[member] - index * layout.page_tokens
        for target, source, count in _runs(member.tolist(), offsets.tolist()):
            rows.narrow(3, target, count).copy_(page.narrow(3, source, count))
    return rows


def gather_selection(
    layout: PageLayout,
    selection: Sequence[Tensor],
    length: int,
    read: PageReader,
    layers: Sequence[int],
) -> list[tuple[Tensor, Tensor]]:
    """For each of `layers` its selection int64 `[n_kv_heads, m_l]` -> keys and values `[n_kv_heads, m_l, head_dim]`.

    Every head has rows of its own; position -1 means no row and leaves zeros. Every page is read once.
    """
    for positions in selection:
        _require_positions(positions, 2, layout.n_kv_heads)
        _require_range(positions, -1, length)
    flat = torch.cat([positions.reshape(-1) for positions in selection])
    keys, values = (zero_rows((flat.numel(), layout.head_dim), layout.dtype) for _ in range(2))
    targets = torch.nonzero(flat >= 0).squeeze(1)
    if not targets.numel():
        return _split(layout, selection, keys, values)
    positions = flat[targets]
    lanes = _key_lanes(layout, selection, layers)[targets]
    touched, members = _by_page(positions, layout.page_tokens)
    into_keys = _whole_rows(keys)
    into_values = _whole_rows(values)
    for index, member, page in zip(touched, members, read(touched), strict=True):
        page_rows = _whole_rows(page)
        stride = page.shape[3]
        sources = lanes[member] * stride + positions[member] - index * layout.page_tokens
        into = targets[member].numpy()
        into_keys[into] = page_rows[sources.numpy()]
        into_values[into] = page_rows[sources.numpy() + layout.n_kv_heads * stride]
    return _split(layout, selection, keys, values)


def _runs(targets: Sequence[int], sources: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Pairs of indices as stretches in which both go up by one: where each begins, and how long it is.

    Tokens mostly lie side by side; copying them so took a thirtieth of the time that torch takes for an index each.
    """
    begin = 0
    for end in range(1, len(targets) + 1):
        goes_on = end < len(targets) and (
            targets[end] - targets[begin] == sources[end] - sources[begin] == end - begin
        )
        if not goes_on:
            yield targets[begin], sources[begin], end - begin
            begin = end


def _whole_rows(rows: Tensor) -> NDArray[np.void]:
    """Contiguous rows `[..., head_dim]` as `[n]`, each one thing: copied as bytes, where torch copies each number."""
    flat = rows.view(-1, rows.shape[-1]).view(torch.uint8)
    return flat.numpy().view(f"V{flat.shape[1]}")[:, 0]


def _by_page(positions: Tensor, page_tokens: int) -> tuple[list[int], list[Tensor]]:
    """The pages that positions lie in, ascending, and for each the indices of its positions."""
    pages = positions // page_tokens
    order = torch.argsort(pages, stable=True)
    touched, counts = torch.unique_consecutive(pages[order], return_counts=True)
    ends = torch.cumsum(counts, 0)
    return touched.tolist(), [
        order[begin:end] for begin, end in zip((ends - counts).tolist(), ends.tolist(), strict=True)
    ]


def _key_lanes(layout: PageLayout, selection: Sequence[Tensor], layers: Sequence[int]) -> Tensor:
    """For every flattened position which run of token rows in a page holds its key (values: n_kv_heads further)."""
    heads = torch.arange(layout.n_kv_heads)
    return torch.cat(
        [
            (heads + layer * 2 * layout.n_kv_heads).repeat_interleave(positions.shape[1])
            for layer, positions in zip(layers, selection, strict=True)
        ]
    )


def _split(
    layout: PageLayout, selection: Sequence[Tensor], keys: Tensor, values: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """Flattened keys and values back into one pair per selection."""
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
            + (f", the first of {first} KV heads" if first is not None else "")
            + f"; got {positions.dtype} {list(positions.shape)}"
        )


def _require_range(positions: Tensor, lowest: int, length: int) -> None:
    if positions.numel() and (int(positions.min()) < lowest or int(positions.max()) >= length):
        raise RowRangeError(
            f"positions {int(positions.min())}..{int(positions.max())} asked for, "
            f"the session has rows 0..{length - 1}"
        )
