"""Copies of a session's rows to host memory, for retrieval, prompts, repairs and re-selections."""

import torch

from workers.engine.activation import RowSource
from workers.engine.engine import Engine
from workers.engine.session import ResidentSession, WorkerSession
from workers.engine.stored.store_io import map_store_errors
from workers.generation.steps import Steps, wait_for_writes
from workers.retrieval.host_copy import HostCopy

# Tokens whose rows are copied before others run.
_TOKENS_AT_ONCE = 512


def open_host_copy(
    engine: Engine, resident: ResidentSession, *, room: int = 0
) -> Steps[HostCopy | None]:
    """Wait for the session's writes, and reserve memory for a copy of all of its rows.

    The copy has the rows that were copied before, up to the page that was not full then: a store
    that quantises changes rows when it is. room: for so many rows more (`RowArena.extend`).

    Returns None, and the session has no copy, where the copies of running jobs leave no memory for
    this one.
    """
    session, layout = resident.session, engine.store.layout
    yield from wait_for_writes(engine, session)
    settings = resident.config.retrieval
    needed = HostCopy.bytes_for(layout, settings, session.length + room)
    copy = session.host_copy
    # Memory that is allocated stays so when rows are dropped.
    if not _reserve_memory(engine, session, max(needed, copy.nbytes if copy else 0)):
        return None
    if copy is None:
        copy = session.host_copy = HostCopy(layout, settings)
    # At once, so that others that run meanwhile see what it takes.
    copy.arena.reserve(session.length + room)
    first = min(copy.arena.length, session.length)
    copy.truncate(first - first % layout.page_tokens)
    return copy


def copy_rows(copy: HostCopy, source: RowSource, session: str, stop: int) -> None:
    """Copy the rows before position `stop` that are missing. Raises the errors of the source."""
    if copy.arena.length < stop:
        heads, layers = copy.layout.n_kv_heads, copy.layout.n_layers
        span = torch.arange(copy.arena.length, stop).expand(heads, -1).contiguous()
        copy.append(source.gather_selection(session, [span] * layers))


def fill_host_copy(
    engine: Engine,
    resident: ResidentSession,
    source: RowSource | None = None,
    *,
    index: bool = True,
    room: int = 0,
) -> Steps[HostCopy | None]:
    """Copy all of a session's rows to host memory, and index them; yields between copies.

    source: of the rows, the engine's store unless given; index: False leaves the rows without an
    index, for readers of all keys. Returns None, and takes `room`, as `open_host_copy`. Raises the
    errors of the store.
    """
    session = resident.session
    copy = yield from open_host_copy(engine, resident, room=room)
    if copy is None:
        return None
    while copy.arena.length < session.length:
        with map_store_errors():
            stop = min(session.length, copy.arena.length + _TOKENS_AT_ONCE)
            copy_rows(copy, source or engine.store, session.name, stop)
        yield None
    if index:
        yield from copy.index_rows()
    return copy if _reserve_memory(engine, session, copy.nbytes) else None


def _reserve_memory(engine: Engine, session: WorkerSession, nbytes: int) -> bool:
    """Reserve bytes of the host cache for the session's copy; without room it has none."""
    if engine.host_cache.reserve(session.name, nbytes):
        return True
    engine.drop_host_copy(session)
    return False
