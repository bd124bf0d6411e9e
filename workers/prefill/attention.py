"""Attention of a block over gathered rows: those that its lines touch, tile by tile."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvrecall.domain.settings.prefill import Prefill
from workers.prefill.block_rows import TILE, BlockRows
from workers.prefill.lines import Lines
from workers.primitives.selection import gather_or_empty, mask_to_indices

# Rows of a tile are padded to a multiple of this: kernels read masks in aligned runs.
_ALIGNED = 16
# So many tiles in a row attend to the union of their rows if it has at most this many times their mean:
# one list for all queries is gathered once, and one large product is faster than many small ones.
_SPAN = 8
_ALIKE = 1.25


@dataclass(frozen=True, eq=False)
class Places:
    """The rows that each tile of a block attends to.

    Attributes:
        wanted: bool `[n_kv_heads, tiles, n]`; where a query may not see a row of its tile, the row
            is masked for it.
        alike: Where all tiles of a span attend to the same rows, bool `[n_kv_heads, spans]`.
        exact: KV heads that attend to every row, bool `[n_kv_heads]`.
        density: Share of the rows, over the tiles that could see them, float64 `[n_kv_heads]`; 1
            for exact heads.
    """

    wanted: Tensor
    alike: Tensor
    exact: Tensor
    density: Tensor


def find_places(rows: BlockRows, lines: Lines, settings: Prefill) -> Places:
    """Find the rows of every tile: those on the lines of any query head of the group, each once.

    More cells are computed than the lines have, which only adds cover: a row that one query of a
    tile wants is attended to by all of them, in all heads of the group. A KV head whose tiles take
    more than `max_density` of the rows attends to all.
    """
    groups = (len(rows.keys), rows.group, -1)
    columns = lines.columns.view(*groups).any(1) | rows.always(settings.sinks)
    starts = torch.arange(rows.first, rows.end, TILE, device=columns.device)[:, None]
    lasts = (starts + TILE - 1).clamp(max=rows.end - 1)
    visible = rows.positions[:, None] <= lasts
    offsets = lines.offsets.view(*groups).any(1)
    offsets[:, : settings.band] = True
    wanted = visible & (columns[:, None] | _touched(offsets, rows.positions, starts, lasts))
    queries = (lasts - starts + 1).double()
    alike = [
        _unite(wanted[:, span : span + _SPAN], queries[span : span + _SPAN])
        for span in range(0, len(queries), _SPAN)
    ]
    density = (wanted & visible).mul(queries).sum((1, 2)) / (visible * queries).sum((1, 2))
    exact = lines.exact.view(*groups).any((1, 2)) | (density > settings.max_density)
    return Places(wanted, torch.stack(alike, 1), exact, density.masked_fill(exact, 1.0))


def attend(rows: BlockRows, places: Places) -> Tensor:
    """Attention over each tile's places: one softmax over one list of rows.

    Runs on any device: a span's tiles are a batch, their lists padded to the longest, or one tile. Returns
    `[n_heads, t, head_dim]`.
    """
    exact = places.exact.tolist()
    heads = [
        _attend_exactly(rows.heads(head, head + 1))
        if exact[head]
        else _attend_spans(rows.heads(head, head + 1), places.wanted[head], alike)
        for head, alike in enumerate(places.alike.tolist())
    ]
    return torch.cat(heads)


def _attend_spans(rows: BlockRows, wanted: Tensor, alike: Sequence[bool]) -> Tensor:
    """Attention of one KV head's group; wanted: bool `[tiles, n]`."""
    parts = []
    for number, same in enumerate(alike):
        tiles = wanted[number * _SPAN : (number + 1) * _SPAN]
        start = number * _SPAN * TILE
        part = rows.part(start, min(start + _SPAN * TILE, rows.tokens))
        parts.append(
            _attend_tiles(part, tiles[:1], part.tokens)
            if same
            else _attend_tiles(part, tiles, TILE)
        )
    return torch.cat(parts, 1)


def _unite(wanted: Tensor, queries: Tensor) -> Tensor:
    """Let a span's tiles, bool `[n_kv_heads, tiles, n]`, want the union where they are alike.

    queries: of each tile, `[tiles, 1]`. Returns where they are, bool `[n_kv_heads]`.
    """
    union = wanted.any(1, keepdim=True)
    alike = union.sum((1, 2)) * queries.sum() <= _ALIKE * (wanted * queries).sum((1, 2))
    wanted |= union & alike[:, None, None]
    return alike


def _touched(offsets: Tensor, positions: Tensor, starts: Tensor, lasts: Tensor) -> Tensor:
    """Rows at one of the offsets from some query of a tile, bool `[n_kv_heads, tiles, n]`.

    offsets: bool `[n_kv_heads, o]`; starts, lasts: positions of the tiles' queries `[tiles, 1]`.
    """
    ends = torch.nn.functional.pad(offsets.long().cumsum(1), (1, 0))  # offsets under each distance
    size = ends.shape[1] - 1

    def under(distance: Tensor) -> Tensor:
        return ends.gather(1, distance.clamp(0, size).flatten(1)).view(distance.shape)

    known = positions.long()[:, None]
    return under(lasts - known + 1) > under(starts - known)


def _attend_tiles(rows: BlockRows, wanted: Tensor, size: int) -> Tensor:
    """Attention of one KV head's group, `size` queries over each tile's rows, bool `[tiles, n]`."""
    tiles = len(wanted)
    indices = mask_to_indices(wanted)
    indices = torch.nn.functional.pad(indices, (0, -indices.shape[1] % _ALIGNED), value=-1)
    at = gather_or_empty(rows.positions.expand(tiles, -1), indices)
    # Queries that only fill the last tile see what is before them, and are dropped.
    queries = rows.first + torch.arange(tiles * size, device=at.device).view(tiles, size)
    hidden = at[:, None] > queries[..., None]
    mask = torch.zeros(hidden.shape, dtype=rows.queries.dtype, device=at.device)
    mask.masked_fill_(hidden, -torch.inf)
    flat = indices.clamp(min=0).flatten()
    keys, values = (
        part[0].index_select(0, flat).view(tiles, 1, -1, part.shape[-1])
        for part in (rows.keys, rows.values)
    )
    fill = tiles * size - rows.tokens
    grouped = torch.nn.functional.pad(rows.queries, (0, 0, 0, fill))
    grouped = grouped.view(rows.group, tiles, size, -1).transpose(0, 1).flatten(1, 2)
    out = torch.nn.functional.scaled_dot_product_attention(
        grouped[:, None],
        keys,
        values,
        attn_mask=mask.repeat(1, rows.group, 1)[:, None],
        scale=rows.scale,
    )
    out = out.view(tiles, rows.group, size, -1).transpose(0, 1).flatten(1, 2)
    return out[:, : rows.tokens]


def _attend_exactly(rows: BlockRows) -> Tensor:
    """Attention of one KV head's group over every row."""
    hidden = rows.positions > rows.query_positions[:, None]
    mask = torch.zeros(hidden.shape, dtype=rows.queries.dtype, device=hidden.device)
    mask.masked_fill_(hidden, -torch.inf)
    out = torch.nn.functional.scaled_dot_product_attention(
        rows.queries.flatten(0, 1)[None, None],
        rows.keys[None],
        rows.values[None],
        attn_mask=mask.repeat(rows.group, 1),
        scale=rows.scale,
    )
    return out.view(rows.queries.shape)
