"""One operator of torch for the kernels of a layer: passes that have it are captured as they are."""

from typing import Any

import torch
import triton
from torch import Tensor

from workers.kernels.attend import attend
from workers.kernels.draw import draw
from workers.kernels.score import score
from workers.kernels.weigh import weigh

SPLIT_ROWS = 256
"""Rows of a head that one program scores."""

# A product has tiles of so many rows and columns at least, of bytes of so many along the sums.
_LEAST_TILE, _LEAST_BYTES = 16, 32
# Rows of a head whose priorities a program of the draw holds at once.
_DRAWN_AT_ONCE = 1024
# Numbers of keys that a program attends to at once, and most rows.
_ATTENDED_AT_ONCE, _MOST_ATTENDED = 4096, 64


def runs_on(device: torch.device) -> bool:
    """True if the kernels run on a device: on a GPU, and in Triton's interpreter on a CPU."""
    return device.type == ("cpu" if triton.knobs.runtime.interpret else "cuda")


def choose_sizes(
    heads: int, group: int, dim: int, page_rows: int, splits: int
) -> dict[str, dict[str, int]]:
    """Choose what each kernel is compiled for, by the kernel's name.

    heads: KV heads; group: query heads of each; dim: channels; page_rows: rows of a head in a page; splits: parts
    in which a head's rows are scored.
    """
    shape = {"heads": heads, "group": group, "dim": dim, "page_rows": page_rows}
    tiles = shape | {"padded_group": _pad(group, _LEAST_TILE)}
    padded_dim = _pad(dim, _LEAST_TILE)
    attended = min(max(_ATTENDED_AT_ONCE // padded_dim, _LEAST_TILE), _MOST_ATTENDED)
    return {
        "score": tiles
        | {"padded_quads": _pad(-(-dim // 4), _LEAST_BYTES), "split_rows": SPLIT_ROWS},
        "weigh": {
            "heads": heads,
            "group": group,
            "padded_splits": _pad(splits, 1),
            "split_rows": SPLIT_ROWS,
        },
        "draw": {"heads": heads, "chunk": _DRAWN_AT_ONCE},
        "attend": tiles | {"padded_dim": padded_dim, "chunk": attended},
    }


def launch(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    mask: Tensor | None,
    described: Tensor,
    ranks: Tensor,
    pages: int,
    page_rows: int,
    width: int,
    most: int,
    codes: list[int],
    parts: list[int],
    rotation: list[int],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Launch the kernels of a layer: nothing here waits for the device, or depends on what is in a tensor.

    queries: `[B, n_kv_heads, group, head_dim]`; keys and values: of active rows, `[B, n_kv_heads, n,
    head_dim]`; positions: theirs, int32 `[B, n_kv_heads, n]`; mask: added to their logits, `[B, n_kv_heads,
    n]`. described, ranks, pages, page_rows, width, most: of a `SearchedTable`. codes, parts: bytes to the layer's
    scales and codes, and to its keys and values. rotation: of the layer's ranks, what ranks are rotated by less
    than, the process's first head, and the step from head to head.

    Returns the output as `queries`, and what was drawn, int32 `[B, n_kv_heads, 1 + most]`: how many rows, and their
    positions in order, -1 for none.
    """
    batch, heads, group, dim = queries.shape
    splits = width // SPLIT_ROWS
    active = keys.shape[2]
    numbers: dict[str, Any] = {"dtype": torch.float32, "device": queries.device}
    logits = torch.empty(batch, heads, group, width, **numbers)
    largest = torch.empty(batch, heads, group, splits, **numbers)
    sums = torch.empty_like(largest)
    marks = torch.zeros(batch, heads, width, dtype=torch.int8, device=queries.device)
    weights = torch.empty(batch, heads, width, **numbers)
    drawn = queries.new_full((batch, heads, 1 + most), -1, dtype=torch.int32)
    shares = torch.empty(batch, heads, 2, **numbers)
    lasts = queries.new_empty((batch, heads), dtype=torch.int32)
    out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)

    sizes = choose_sizes(heads, group, dim, page_rows, splits)
    table = (described, described.stride(0))
    asked, placed = _locate(queries), _locate(positions)
    score[(batch * heads, splits)](
        *(*asked, *placed, active, *table, pages, *codes, scale),
        *(logits, largest, sums, marks, width),
        **sizes["score"],
    )
    weigh[(batch * heads, splits)](
        *(*table, logits, largest, sums, marks, weights, width), **sizes["weigh"]
    )
    draw[(batch * heads,)](
        *(*table, *placed, active, weights, width, ranks, *rotation),
        *(drawn, shares, lasts, most),
        **sizes["draw"],
    )
    attend[(batch * heads,)](
        *(*asked, *_locate(keys), *_locate(values)),
        *((queries, 0, 0) if mask is None else _locate(mask)),
        *(active, *table, *parts, scale, weights, width, drawn, shares, lasts, most, out),
        **sizes["attend"],
        masked=mask is not None,
    )
    return out, drawn


attend_drawn = torch.library.custom_op("kvrecall::attend_drawn", launch, mutates_args=())
"""`launch` as an operator, whose results' shapes are known without it."""


@attend_drawn.register_fake
def _shapes(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    mask: Tensor | None,
    described: Tensor,
    ranks: Tensor,
    pages: int,
    page_rows: int,
    width: int,
    most: int,
    codes: list[int],
    parts: list[int],
    rotation: list[int],
    scale: float,
) -> tuple[Tensor, Tensor]:
    drawn = queries.new_empty((*queries.shape[:2], 1 + most), dtype=torch.int32)
    return queries.new_empty(queries.shape), drawn


def _locate(tensor: Tensor) -> tuple[Tensor, int, int]:
    """A tensor `[B, n_kv_heads, ...]`, and how far its sessions and heads are apart."""
    return tensor, tensor.stride(0), tensor.stride(1)


def _pad(count: int, least: int) -> int:
    """Round up to a power of two, as sizes of tiles are."""
    return max(least, int(triton.next_power_of_2(count)))
