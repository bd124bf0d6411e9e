"""Filling of a session's rows in host memory, from which its steps retrieve and its repairs search."""

import time
from collections.abc import Callable

import torch

from workers.engine.activation import RowSource
from workers.engine.engine import Engine
from workers.engine.session import ResidentSession, WorkerSession
from workers.engine.store_io import map_store_errors
from workers.generation.steps import Steps, wait_for_writes
from workers.retrieval.indexed_rows import IndexedRows
from workers.retrieval.settings import FOR_REPAIRS

# Tokens whose rows are copied into the arena before others run.
_TOKENS_AT_ONCE = 512


def fill_rows(
    engine: Engine,
    resident: ResidentSession,
    source: RowSource | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
    *,
    index: bool = True,
    room: int = 0,
) -> Steps[IndexedRows | None]:
    """Wait for the session's writes, then copy its rows into its arena, and index them.

    Rows are read again from the page on that was not full: a store that quantises changes them when
    it is. Once a stop is requested some rows are missing, and the arena is shorter than the session.
    Yields between copies. source: of the rows, the engine's store unless given; index: False leaves
    the rows without an index, for readers of all keys; room: for so many rows more (`RowArena.extend`).

    Returns None, and the session has no arena, where the arenas of running turns leave no memory for
    this one. Raises the errors of the store.
    """
    session, layout = resident.session, engine.store.layout
    yield from wait_for_writes(engine, session)
    settings = resident.config.retrieval or FOR_REPAIRS
    needed = IndexedRows.bytes_for(layout, settings, session.length + room)
    if not _reserve_memory(engine, session, needed):
        session.drop_indexed_rows()
        return None
    source = source or engine.store
    rows = session.indexed_rows
    if rows is None:
        rows = session.indexed_rows = IndexedRows(layout, settings)
    # At once, so that others that run meanwhile see what it takes.
    rows.arena.reserve(session.length + room)
    rows.used_at = time.monotonic()
    arena = rows.arena
    first = min(arena.length, session.length)
    rows.truncate(first - first % layout.page_tokens)
    while arena.length < session.length and not stop_requested():
        stop = min(session.length, arena.length + _TOKENS_AT_ONCE)
        span = torch.arange(arena.length, stop).expand(layout.n_kv_heads, -1).contiguous()
        with map_store_errors():
            rows.append(source.gather_selection(session.name, [span] * layout.n_layers))
        yield None
    if index:
        yield from rows.index_rows()
    return rows


def _reserve_memory(engine: Engine, session: WorkerSession, needed: int) -> bool:
    """Free the longest unused arenas until there is room for this session's `needed` bytes.

    Arenas of sessions whose turn is running stay: what an answer retrieves does not change within
    it. Returns False if they leave no room.
    """
    limit = engine.retrieval_bytes
    others = [
        (each, each.indexed_rows)
        for each in engine.sessions.values()
        if each is not session and each.indexed_rows is not None
    ]
    others.sort(key=lambda other: other[1].used_at)
    used = sum(rows.nbytes for _, rows in others)
    for each, rows in others:
        if used + needed <= limit:
            break
        if not each.dirty:
            used -= rows.nbytes
            each.drop_indexed_rows()
    return used + needed <= limit
