"""Choice of what a prefilled block attends to: lines of its active rows, or every stored row."""

import torch
from torch import Tensor

from workers.cache.forward_step import BlockAttention
from workers.engine.activation import LayerSource
from workers.engine.engine import Engine
from workers.engine.session import ResidentSession
from workers.engine.stored.store_io import map_store_errors
from workers.generation.exactness import note_block
from workers.generation.host_copy import fill_host_copy
from workers.generation.steps import Steps, wait_for_writes
from workers.prefill.sparse_block import SparseBlock
from workers.prefill.stored_block import JoinRows, StoredBlock, concatenate


def begin_block(
    engine: Engine, resident: ResidentSession, tokens: int, source: LayerSource | None = None
) -> Steps[BlockAttention | None]:
    """Begin the attention of the session's next block; None: it attends to all active rows.

    source: of the stored rows, the engine's store unless given. Raises the errors of the store.
    """
    settings = resident.config.prefill
    session = resident.session
    if settings.attend == "active":
        note_block(engine, resident)
    if settings.sparse != "off":
        return SparseBlock(settings, session.config.seed, session.length)
    if settings.attend == "active":
        return None
    engine.make_room(resident, tokens)
    if engine.cache.holds_all(resident.slot, session.length):
        return None
    join = yield from _join_stored(engine, resident, source)
    return StoredBlock(session.length, join, engine.long_sessions.view(session))


def _join_stored(
    engine: Engine, resident: ResidentSession, source: LayerSource | None
) -> Steps[JoinRows]:
    """Return what joins a layer's stored rows with those of a block.

    The stored rows are those of the session's copy in host memory. They are read from the stored pages,
    in each layer anew, where there is no memory for the copy, and for a scratch session, which has the
    rows of the session that it was made of.
    """
    session = resident.session
    transfers = engine.cache.transfers
    owner = engine.sessions.get(session.name, session)
    if owner is session:
        copy = yield from fill_host_copy(engine, resident, source, index=False)
        if copy is not None:
            return concatenate(copy.rows.split_rows, transfers)
    yield from wait_for_writes(engine, owner)
    heads = engine.store.layout.n_kv_heads
    positions = torch.arange(session.length).expand(heads, -1).contiguous()
    rows = source or engine.store

    def read(layer: int) -> tuple[list[Tensor], list[Tensor]]:
        with map_store_errors():
            keys, values = rows.gather_heads(session.name, layer, positions)
        return [keys], [values]

    return concatenate(read, transfers)
