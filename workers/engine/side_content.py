"""Windows and recurrent states of a session in its slot: filled, followed, and taken back with its rows."""

import torch

from workers.cache.row_packing import RowPacking
from workers.cache.side_cache import SideCache
from workers.cache.slot_pool import KVRows, KVShape
from workers.engine.session import WorkerSession
from workers.engine.snapshots import Snapshot
from workers.engine.stored.store_io import SlotContent


def fill_side(side: SideCache, session: WorkerSession, content: SlotContent, rows: KVShape) -> None:
    """Fill a session's empty slot with what the store has of its windows and states.

    rows: shape of the managed rows, in whose form windows are stored.
    """
    assert session.slot is not None, "a slot is filled that was claimed"
    if content.windows is not None:
        _fill_windows(side, session.slot, content.windows, session.length, rows)
    if side.states is not None and content.state is not None:
        side.states.put(session.slot, side.states.unpack(content.state))
    session.side_length = session.length
    keep_snapshot(side, session)


def keep_snapshot(side: SideCache, session: WorkerSession) -> None:
    """Keep a copy of the states that the session's slot has now."""
    assert session.slot is not None, "states are those of a slot"
    if side.states is not None:
        session.snapshot = Snapshot(session.length, side.states.copy(session.slot))


def rewind_side(side: SideCache, session: WorkerSession) -> None:
    """Follow a session that has lost its last rows: drop those of windows, put the states back.

    Where these are no longer there the slot's content is stale: it must be read from the store again.
    """
    assert session.slot is not None, "only a slot's content is taken back"
    length = session.length
    side.drop_from(session.slot, length)
    session.side_length = -1
    if side.states is not None:
        if session.snapshot.position != length:
            return
        side.states.put(session.slot, session.snapshot.state)
    if side.is_complete(session.slot, length):
        session.side_length = length


def _fill_windows(
    side: SideCache, slot: int, packed: torch.Tensor, length: int, rows: KVShape
) -> None:
    """Fill the windows of a slot with rows that end at position `length`, in the form of pages."""
    assert side.windows is not None, "rows of windows were read"
    shape = side.windows.shape
    layers = RowPacking(shape, rows).unpack(packed)
    first = length - packed.shape[3]
    for layer, window in enumerate(side.reach):
        begin = max(first, window.first_seen(length))
        keys, values = layers[layer][:, :, begin - first :]
        positions = torch.arange(begin, length, dtype=torch.int32).expand(shape.n_kv_heads, -1)
        none = torch.zeros(positions.shape, dtype=torch.bool)
        filled = KVRows(keys, values, positions.contiguous(), none, none.float())
        side.windows.fill(slot, layer, filled)
