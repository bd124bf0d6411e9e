"""Maps of a committed state: which rows of which tokens are active, in cells or token by token.

Pure functions of the state's bytes: they need no open session, no slot and no stored row.
"""

import torch
from torch import Tensor

from kvrecall.protocol.v1 import worker_pb2 as pb
from workers.cache.active_cache import EMPTY, KVShape
from workers.engine.selection import Selection
from workers.engine.session_state import read_scores, selection_from_state
from workers.engine.settings import WorkerSettings
from workers.errors import BadSettings

_FULL = 255
ACTIVE, PROMOTED = 1, 2
"""Values of a row in `MapRowsResult.rows`; 0 is a row that is not active."""


def map_rows(
    request: pb.MapRowsRequest, shape: KVShape, settings: WorkerSettings
) -> pb.MapRowsResult:
    """Map the active rows of a state's tokens, of a model of this `shape`.

    Raises IncompatibleState for a state of another version, BadSettings for a head that the model
    does not have.
    """
    if request.head >= shape.n_kv_heads:
        raise BadSettings(
            f"there is no KV head {request.head}: the model has {shape.n_kv_heads}, from 0"
        )
    state = request.state
    result = pb.MapRowsResult(sinks=settings.sinks, recent=settings.recent)
    start, stop = request.start, min(request.stop, state.length + state.unsettled)
    selection = selection_from_state(state)
    if selection is None or start >= stop:
        return result
    if request.columns:
        bounds = _split(start, stop, request.columns)
        head = request.head if request.HasField("head") else None
        for layer in range(len(selection.positions)):
            active, promoted = _count_cells(selection, layer, bounds, head)
            result.layers.add(active=active, promoted=promoted)
    if request.tokens:
        result.rows = _mark_rows(selection, start, stop)
        scores = read_scores(state)
        dense = scores.to_dense(max(stop, state.length))[start:stop]
        result.scores.extend(torch.where(dense.isinf(), torch.nan, dense).tolist())
    return result


def _split(start: int, stop: int, columns: int) -> Tensor:
    """Bounds of the columns: int64 `[columns + 1]`, ascending, at most one column per token."""
    n = stop - start
    columns = min(columns, n)
    return start + torch.arange(columns + 1) * n // columns


def _count_cells(
    selection: Selection, layer: int, bounds: Tensor, head: int | None
) -> tuple[bytes, bytes]:
    """Shares of a layer's rows that are active, and that are promoted: a byte per column."""
    heads = slice(None) if head is None else slice(head, head + 1)
    positions = selection.positions[layer][heads]
    promoted = selection.promoted[layer][heads]
    rows = bounds.diff() * len(positions)
    return (
        _scale(_histogram(positions[positions != EMPTY], bounds), rows),
        _scale(_histogram(positions[promoted & (positions != EMPTY)], bounds), rows),
    )


def _histogram(positions: Tensor, bounds: Tensor) -> Tensor:
    """Count positions, int32 `[k]`, per column; those outside of all columns are not counted."""
    inside = positions[(positions >= bounds[0]) & (positions < bounds[-1])].to(torch.int64)
    columns = torch.searchsorted(bounds, inside, right=True) - 1
    return torch.bincount(columns, minlength=len(bounds) - 1)


def _scale(counts: Tensor, rows: Tensor) -> bytes:
    """Scale counts to bytes, so that only no rows are 0 and only all of them 255."""
    shares = (counts * _FULL).div(rows, rounding_mode="floor").clamp(1, _FULL - 1)
    shares = torch.where(counts == 0, 0, torch.where(counts == rows, _FULL, shares))
    return shares.to(torch.uint8).numpy().tobytes()


def _mark_rows(selection: Selection, start: int, stop: int) -> bytes:
    """Mark the rows of each token: a byte per token, layer and head, in this order."""
    heads = len(selection.positions[0])
    marks = torch.zeros(stop - start, len(selection.positions), heads, dtype=torch.uint8)
    for layer, (positions, promoted) in enumerate(
        zip(selection.positions, selection.promoted, strict=True)
    ):
        head, row = ((positions >= start) & (positions < stop)).nonzero(as_tuple=True)
        at = positions[head, row].to(torch.int64) - start
        marks[at, layer, head] = promoted[head, row].to(torch.uint8) + ACTIVE
    return marks.numpy().tobytes()
