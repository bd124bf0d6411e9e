"""Arrays of an index: growing at their end, and gathered by runs of rows."""

import torch
from torch import Tensor

# Arrays grow by a share of their length: less memory is reserved, for more copies.
_GROWTH = 1 / 32


def reserve_behind(part: Tensor, end: int, needed: int, granule: int = 1) -> Tensor:
    """Return `part` `[n_kv_heads, n, ...]` if it has room for `needed`, else a longer copy of its first `end`.

    granule: n is a multiple of it.
    """
    if needed <= part.shape[1]:
        return part
    # The first piece of an array may be all of it.
    length = needed if end == 0 else needed + int(_GROWTH * needed)
    length = -(-length // granule) * granule
    longer = part.new_empty(len(part), length, *part.shape[2:])
    longer[:, :end] = part[:, :end]
    return longer


def append_behind(part: Tensor | None, end: int, added: Tensor, granule: int = 1) -> Tensor:
    """Write behind the first `end` of `part` `[n_kv_heads, n, ...]`, in a longer copy if need be.

    part: None for an array that is to be made; granule: n is a multiple of it.
    """
    if part is None:
        part = added.new_empty(len(added), 0, *added.shape[2:])
    needed = end + added.shape[1]
    part = reserve_behind(part, end, needed, granule)
    part[:, end:needed] = added
    return part


def grown_bytes(nbytes: int) -> int:
    """Most bytes of an array of `nbytes`, with what is reserved."""
    return int((1 + _GROWTH) * nbytes)


def gather_runs(rows: Tensor, runs: Tensor, length: int) -> Tensor:
    """Gather runs of `length` consecutive rows, which lie in one piece.

    rows: `[n_kv_heads, capacity, d]`, contiguous, the capacity a multiple of `length`; runs: int64
    `[n_kv_heads, m]`. Returns `[n_kv_heads, m * length, d]`.
    """
    heads, capacity, d = rows.shape
    first = capacity // length * torch.arange(heads, device=rows.device)[:, None]
    blocks = rows.view(-1, length * d).index_select(0, (first + runs).flatten())
    return blocks.view(heads, -1, d)
