"""Forget rows until a session is inside its budget: observe, score, select, keep."""

import torch
from torch import Tensor

from workers.cache import EMPTY, ActiveCache
from workers.methods import LayerRows
from workers.selection import protected
from workers.session import WorkerSession
from workers.settings import WorkerSettings


def evict(cache: ActiveCache, session: WorkerSession, settings: WorkerSettings, *, turn_over: bool = False) -> None:
    """Bring the session's slot down to its target rows in every layer and head; nothing happens within it.

    Sinks, the recent window, rows that a repair brought back and, up to their share, the current turn's rows stay;
    the method ranks the others. `turn_over`: the turn's own rows are no longer protected.
    """
    assert session.slot is not None, "only a session in a slot evicts"
    if not session.method.evicts or max(cache.longest(session.slot)) <= session.target_rows:
        return
    observed = session.queries.observed()
    leaving = torch.zeros(session.length, device=cache.device)
    for layer in range(cache.shape.n_layers):
        held = cache.read(session.slot, layer)
        keys, values, positions = held.keys, held.values, held.positions
        rows = LayerRows(
            layer=layer,
            keys=keys,
            values=values,
            positions=positions,
            queries=observed.queries[layer]
            if observed.queries
            else keys.new_zeros(cache.shape.n_heads, 0, keys.shape[2]),
            query_positions=observed.positions.to(keys.device),
            accumulated=torch.zeros_like(positions, dtype=torch.float32),
            end=session.length,
            seed=session.seed + session.length,
        )
        scores = session.method.scores(rows)
        kept = held.promoted | _protected(positions, session, settings, turn_over)
        ranked = scores.masked_fill(kept, torch.inf)
        places = session.method.select(ranked, rows, session.target_rows)
        leaving += _scores_of_leaving(scores, positions, places, session.length) / cache.shape.n_layers
        cache.keep(session.slot, layer, places)
    leaving = leaving.cpu()
    evicted = leaving != 0
    session.scores_of_evicted()[evicted] = leaving[evicted]


def _protected(positions: Tensor, session: WorkerSession, settings: WorkerSettings, turn_over: bool) -> Tensor:
    share = int(session.base_rows * settings.turn_share) - settings.sinks - settings.recent
    return protected(
        positions,
        sinks=settings.sinks,
        recent=settings.recent,
        turn_start=session.turn_start,
        turn_rows=0 if turn_over else max(0, share),
        end=session.length,
    )


def _scores_of_leaving(scores: Tensor, positions: Tensor, places: Tensor, length: int) -> Tensor:
    """The mean score over the heads that a token leaves: float32 `[length]`, 0 where no head loses it.

    A repair breaks its ties with it (RepairKV Algorithm 1).
    """
    heads, n = positions.shape
    kept = torch.zeros(heads, n + 1, dtype=torch.bool, device=positions.device)
    kept.scatter_(1, torch.where(places < 0, n, places), True)
    leaves = (positions != EMPTY) & ~kept[:, :n]
    where = positions[leaves].long()
    total = torch.zeros(length, device=scores.device).index_add_(0, where, scores[leaves].float())
    return total / heads
