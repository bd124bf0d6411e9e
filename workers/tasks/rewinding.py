"""Going back in a session, to where the chat template says its log otherwise now.

What follows is computed again. The pages that are dropped stay stored until the turn is committed.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from kvrecall.protocol.v1 import worker_pb2 as pb
from workers.cache.active_cache import EMPTY
from workers.engine.engine import Engine
from workers.engine.eviction.evict import select_by_position
from workers.engine.selection import Selection
from workers.engine.session import ResidentSession, WorkerSession
from workers.engine.snapshots import Snapshot
from workers.engine.truncation import truncate
from workers.generation.settling import drop_stored
from workers.generation.steps import Steps, wait_alike


def rewind(
    engine: Engine, resident: ResidentSession, kept: int, pending: Sequence[int]
) -> Steps[None]:
    """Keep the session's first `kept` rows, whole pages; `pending`: token ids behind them.

    Where evictions select by position, the rows become active that they would have left. Others stay
    evicted. Raises RowsMissing and StorageFailed.
    """
    session = resident.session
    engine.drop_host_copy(session)
    session.clear_turn()
    truncate(engine.caches, resident, kept)
    drop_stored(engine, session)
    session.pending = list(pending)
    session.unsettled = 0
    engine.fit_budget(session)
    wanted = _select(engine, resident)
    if engine.is_stale(session):
        yield from _read_anew(engine, resident, wanted)
    elif wanted is not None:
        yield from _read_rows(engine, resident, wanted)


def _select(engine: Engine, resident: ResidentSession) -> Selection | None:
    """Select the rows that evictions by position leave of the session; None if these are active on all ranks."""
    length = resident.session.length
    active = Selection.from_slot(engine.cache, resident.slot)
    if not resident.config.recalls:
        return None
    heads = engine.model.shape.n_kv_heads
    positions = [
        at.to(torch.int32).expand(heads, -1).contiguous()
        for at in select_by_position(resident, engine.settings, length)
    ]
    if not engine.group.some([not all(map(_is_same, active.positions, positions))])[0]:
        return None
    promoted = tuple(torch.zeros(each.shape, dtype=torch.bool) for each in positions)
    return Selection(tuple(positions), promoted)


def _is_same(active: torch.Tensor, wanted: torch.Tensor) -> bool:
    known = [row[row != EMPTY].sort().values for row in active]
    return all(
        len(ours) == len(theirs) and bool((ours == theirs).all())
        for ours, theirs in zip(known, wanted, strict=True)
    )


def _read_rows(engine: Engine, resident: ResidentSession, wanted: Selection) -> Steps[None]:
    """Make a selection active, of which the store has all rows."""
    session = resident.session
    read = engine.store_io.gather(session.name, wanted.store_positions())
    found = yield from wait_alike(engine, read)
    for layer, (keys, values) in enumerate(found):
        none = torch.zeros(
            engine.cache.read(resident.slot, layer).positions.shape, dtype=torch.bool
        )
        engine.cache.insert(
            resident.slot,
            layer,
            wanted.positions[layer],
            keys,
            values,
            wanted.promoted[layer],
            keep=none.to(engine.cache.device),
        )
    session.promoted_rows = 0


def _read_anew(engine: Engine, resident: ResidentSession, wanted: Selection | None) -> Steps[None]:
    """Fill the session's slot from the store, with the rows that it has, or with those that are wanted."""
    session = resident.session
    active = session.active_selection(engine.cache)
    selection = wanted or active
    if selection is None:
        return
    read = engine.store_io.read_slot(session, selection.store_positions(), session.length)
    yield from wait_alike(engine, read)
    engine.swap_out(session)
    session.selection, session.prefetched = selection, read
    session.promoted_rows = session.promoted_rows if wanted is None else 0
    engine.swap_in(session)


def find_floor(turns: Sequence[pb.LoggedTurn], number: int) -> int:
    """Find the least number of rows that a turn after the first `number` goes back to."""
    rewrites = (turn.rewrite.kept for turn in turns[number:] if turn.HasField("rewrite"))
    return min(rewrites, default=sys.maxsize)


@dataclass
class Rewinds:
    """The recurrent states that a replay comes to, where a later turn goes back to."""

    positions: frozenset[int]
    states: dict[int, Snapshot] = field(default_factory=dict)

    def keep(self, snapshot: Snapshot) -> None:
        """Keep a state that the session's slot has passed, if it is one of these."""
        if snapshot.state and snapshot.position in self.positions:
            self.states[snapshot.position] = snapshot.to_host()

    def restore(self, session: WorkerSession, position: int) -> None:
        """Give the session the state after `position` rows, where it is kept."""
        if position in self.states:
            session.snapshot = self.states[position]
