"""Filling of a session's rows in host memory, from which its steps retrieve and its repairs search."""

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

    Returns None, and the session has no arena, where the copies of running jobs leave no memory for
    this one. Raises the errors of the store.
    """
    session, layout = resident.session, engine.store.layout
    yield from wait_for_writes(engine, session)
    settings = resident.config.retrieval or FOR_REPAIRS
    needed = IndexedRows.bytes_for(layout, settings, session.length + room)
    rows = session.indexed_rows
    # Memory that is allocated stays so when rows are dropped.
    if not _reserve_memory(engine, session, max(needed, rows.nbytes if rows else 0)):
        return None
    source = source or engine.store
    if rows is None:
        rows = session.indexed_rows = IndexedRows(layout, settings)
    # At once, so that others that run meanwhile see what it takes.
    rows.arena.reserve(session.length + room)
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
    return rows if _reserve_memory(engine, session, rows.nbytes) else None


def _reserve_memory(engine: Engine, session: WorkerSession, nbytes: int) -> bool:
    """Reserve bytes of the host cache for the session's copy; without room it has none."""
    if engine.host_cache.reserve(session.name, "copies", nbytes):
        return True
    engine.drop_indexed_rows(session)
    return False
