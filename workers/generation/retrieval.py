"""Preparation of a session's steps for retrieval: room in the slot, and rows in the arena."""

import time

import torch

from kvstore.index.arena import RowArena
from workers.engine.activation import RowSource
from workers.engine.engine import Engine
from workers.engine.session import ResidentSession, WorkerSession
from workers.engine.store_io import map_store_errors
from workers.generation.steps import Steps, wait_for_writes
from workers.retrieval.retriever import Retriever

# Tokens whose rows are copied into the arena before others run.
_TOKENS_AT_ONCE = 512


def prepare_retrieval(
    engine: Engine, resident: ResidentSession, source: RowSource | None = None
) -> Steps[None]:
    """Prepare the session's next step, of one token, to retrieve.

    Afterwards every row of the session is active, or in the arena. What is retrieved is therefore a
    function of the session's tokens alone, however far writes have come. Rows are read again from
    the page on that was not full: a store that quantises changes them when it is.

    Nothing happens for a session without retrieval, while all rows are active, and where the arenas
    of running turns leave no memory for this one: the turn then goes on without retrieval. Yields
    between copies. source: of the rows, the engine's store unless given. Raises the errors of the
    store.
    """
    session = resident.session
    if not resident.config.retrieved or session.retrieval_refused:
        return
    engine.make_room(resident, 1 + resident.config.retrieved)
    if not bool((engine.cache.lengths[:, resident.slot] < session.length).any()):
        return
    retriever = session.retriever
    if retriever is not None and retriever.ready and retriever.evictions == session.evictions:
        return
    if not _reserve_memory(engine, session):
        engine.metrics.inc("worker_retrieval_refused_total")
        session.retriever = None
        session.retrieval_refused = True
        return
    if retriever is None:
        settings = resident.config.retrieval
        assert settings is not None, "rows are retrieved only with settings"
        retriever = Retriever(engine.store.layout, settings, resident.config.retrieved)
        session.retriever = retriever
    yield from wait_for_writes(engine, session)
    yield from _fill(engine, retriever, session, source or engine.store)
    retriever.evictions = session.evictions
    retriever.used_at = time.monotonic()
    retriever.ready = True


def _fill(
    engine: Engine, retriever: Retriever, session: WorkerSession, source: RowSource
) -> Steps[None]:
    """Copy the session's rows into its arena, from the end of the last full page on; index them."""
    layout = engine.store.layout
    arena = retriever.arena
    first = min(arena.length, session.length)
    retriever.truncate(first - first % layout.page_tokens)
    while arena.length < session.length:
        stop = min(session.length, arena.length + _TOKENS_AT_ONCE)
        span = torch.arange(arena.length, stop).expand(layout.n_kv_heads, -1).contiguous()
        with map_store_errors():
            arena.append(source.gather_selection(session.name, [span] * layout.n_layers))
        yield None
    yield from retriever.index_rows()


def _reserve_memory(engine: Engine, session: WorkerSession) -> bool:
    """Free the longest unused arenas until there is room for this session's.

    Arenas of sessions whose turn is running stay: what an answer retrieves does not change within
    it. Returns False if they leave no room.
    """
    needed = RowArena.bytes_for(engine.store.layout, session.length)
    limit = engine.settings.retrieval_bytes
    others = [
        each
        for each in engine.sessions.values()
        if each is not session and each.retriever is not None
    ]
    others.sort(key=lambda each: 0.0 if each.retriever is None else each.retriever.used_at)
    used = sum(each.retriever.nbytes for each in others if each.retriever is not None)
    for each in others:
        if used + needed <= limit:
            break
        if each.retriever is not None and not each.dirty:
            used -= each.retriever.nbytes
            each.retriever = None
    return used + needed <= limit
