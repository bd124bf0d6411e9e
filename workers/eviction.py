"""Forget rows until a session is inside its budget: score, select, keep."""

from dataclasses import dataclass

import torch
from torch import Tensor

from workers.cache import EMPTY, ActiveCache
from workers.methods import LayerRows
from workers.observation import Observed
from workers.selection import protected
from workers.session import WorkerSession
from workers.settings import WorkerSettings


@dataclass(frozen=True)
class _Chosen:
    """One layer's eviction: which rows stay, where they lie, and what every row scored."""

    places: Tensor
    positions: Tensor
    scores: Tensor


def over_budget(cache: ActiveCache, session: WorkerSession) -> bool:
    """Whether some layer of the session's slot holds more rows than it keeps."""
    assert session.slot is not None, "only a session in a slot has active rows"
    held = cache.held(session.slot)
    return session.method.evicts and any(n > session.target(layer) for layer, n in enumerate(held))


def evict(
    cache: ActiveCache,
    session: WorkerSession,
    settings: WorkerSettings,
    observed: Observed,
    *,
    turn_over: bool = False,
) -> None:
    """Bring the session's slot down to its target rows in every layer that is over it.

    Sinks, the recent window, rows that a repair brought back and, up to their share, the current turn's rows stay;
    the method ranks the others by what was observed. Layers that share a selection keep the positions that the first
    of them chose. `turn_over`: the turn's own rows are no longer protected.
    """
    assert session.slot is not None, "only a session in a slot evicts"
    held, n_layers, group = cache.held(session.slot), cache.shape.n_layers, session.method.shares_layers
    leaving = torch.zeros(session.length, device=cache.device)
    for first in range(0, n_layers, group):
        layers = range(first, min(first + group, n_layers))
        if all(held[layer] <= session.target(layer) for layer in layers):
            continue
        chosen = _choose(cache, session, settings, observed, first, turn_over)
        leaving += _scores_of_leaving(chosen, session.length) * (len(layers) / n_layers)
        for layer in layers:
            cache.keep(session.slot, layer, _places_in(cache, session.slot, layer, chosen))
            assert cache.held(session.slot)[layer] <= session.target(layer), "a method keeps within its budget"
    leaving = leaving.cpu()
    evicted = leaving != 0
    session.scores_of_evicted()[evicted] = leaving[evicted]


def _choose(
    cache: ActiveCache,
    session: WorkerSession,
    settings: WorkerSettings,
    observed: Observed,
    layer: int,
    turn_over: bool,
) -> _Chosen:
    assert session.slot is not None, "only a session in a slot evicts"
    held = cache.read(session.slot, layer)
    none = held.keys.new_zeros(cache.shape.n_heads, 0, cache.shape.head_dim)
    rows = LayerRows(
        layer=layer,
        keys=held.keys,
        values=held.values,
        positions=held.positions,
        queries=observed.queries[layer] if observed.queries else none,
        query_positions=observed.positions.to(cache.device),
        accumulated=held.accumulated,
        end=session.length,
        seed=session.seed + session.length,
        beside=observed.beside[layer] if observed.beside else None,
    )
    scores = session.method.scores(rows)
    stays = held.promoted | _protected(held.positions, session, settings, layer, turn_over)
    places = session.method.select(scores.masked_fill(stays, torch.inf), rows, session.target(layer))
    return _Chosen(places, held.positions.clone(), scores)


def _places_in(cache: ActiveCache, slot: int, layer: int, chosen: _Chosen) -> Tensor:
    """Where the chosen rows lie in a layer that shares the choice: the same places, if it holds the same rows."""
    positions = cache.read(slot, layer).positions
    if torch.equal(positions, chosen.positions):
        return chosen.places
    wanted = chosen.positions.gather(1, chosen.places.clamp(min=0)).masked_fill(chosen.places < 0, EMPTY)
    stays = (positions[:, :, None] == wanted[:, None, :]).any(-1) & (positions != EMPTY)
    n = positions.shape[1]
    places = torch.where(stays, torch.arange(n, device=positions.device), n).sort(dim=1).values
    return torch.where(places < n, places, -1)


def _protected(
    positions: Tensor, session: WorkerSession, settings: WorkerSettings, layer: int, turn_over: bool
) -> Tensor:
    share = int(session.layer_rows[layer] * settings.turn_share) - settings.sinks - settings.recent
    return protected(
        positions,
        sinks=settings.sinks,
        recent=settings.recent,
        turn_start=session.turn_start,
        turn_rows=0 if turn_over else max(0, share),
        end=session.length,
    )


def _scores_of_leaving(chosen: _Chosen, length: int) -> Tensor:
    """The mean score over the heads that a token leaves: float32 `[length]`, 0 where no head loses it.

    A repair breaks its ties with it (RepairKV Algorithm 1).
    """
    scores, positions, places = chosen.scores, chosen.positions, chosen.places
    heads, n = positions.shape
    kept = torch.zeros(heads, n + 1, dtype=torch.bool, device=positions.device)
    kept.scatter_(1, torch.where(places < 0, n, places), True)
    leaves = (positions != EMPTY) & ~kept[:, :n]
    where = positions[leaves].long()
    total = torch.zeros(length, device=scores.device).index_add_(0, where, scores[leaves].float())
    return total / heads
