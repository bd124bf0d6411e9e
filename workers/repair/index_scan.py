"""Scans of a session through the copy of its rows in host memory (`repair_scan`: "index")."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from workers.engine.engine import Engine
from workers.engine.session import ResidentSession
from workers.generation.indexed_rows import fill_rows
from workers.generation.steps import Steps
from workers.primitives.observation import Observed
from workers.repair.scan.base import ScanResult
from workers.repair.scan.indexed import IndexedScan, indexed, indexed_by_head
from workers.repair.scan.softmax import Contrast, HeadReduction, Signal

_HOST = torch.device("cpu")


def scan_index(
    engine: Engine,
    resident: ResidentSession,
    observed: Observed,
    *,
    contrast: Contrast | None = None,
    counted: Tensor | None = None,
    by_head: HeadReduction | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
) -> Steps[ScanResult | None]:
    """Score the session's tokens as an exact scan does, with the rows that its queries find.

    Returns None if there is no memory for the copy of the rows. What is copied for the scan counts
    as read. Once a stop is requested, the result has what was scored by then.

    contrast, counted: as `scan`'s; by_head: score every layer and KV head on its own, reduced so, as
    `scan_by_head` does. Raises the errors of the store.
    """
    session = resident.session
    before = 0 if session.indexed_rows is None else session.indexed_rows.copied
    rows = yield from fill_rows(engine, resident, stop_requested=stop_requested)
    if rows is None:
        return None
    signal = Signal(observed, engine.store.layout.n_kv_heads, _HOST, contrast)
    bytes_read = (rows.copied - before) * engine.store.layout.token_bytes
    if rows.arena.length < session.length:
        heads = () if by_head is None else (signal.n_layers, signal.n_kv_heads)
        scored = torch.zeros(session.length, dtype=torch.bool)
        none = torch.zeros(*heads, session.length)
        tokens = None if by_head is None else torch.zeros(session.length)
        return ScanResult(none, scored, bytes_read, False, 0.0, "index", tokens)
    scan = IndexedScan(
        rows,
        signal,
        counted=None if counted is None else counted.to(_HOST),
        stop_requested=stop_requested,
        seed=resident.config.seed,
    )
    found = indexed(scan) if by_head is None else indexed_by_head(scan, by_head)
    return replace((yield from found), bytes_read=bytes_read)
