"""Forget rows until a session is inside its budget: score, select, keep."""

from dataclasses import dataclass

import torch
from torch import Tensor

from workers.cache.active_cache import EMPTY, ActiveCache
from workers.engine.ranking import ranked
from workers.engine.session import WorkerSession, nearness
from workers.engine.settings import WorkerSettings
from workers.methods import LayerRows
from workers.primitives.observation import Observed
from workers.primitives.selection import mask_to_indices, position_mask, protected


@dataclass(frozen=True)
class _Chosen:
    """One layer's eviction: which rows stay, where they lie, and what every row scored."""

    places: Tensor
    positions: Tensor
    scores: Tensor


def over_budget(cache: ActiveCache, session: WorkerSession) -> bool:
    """Whether some layer of the session's slot holds more rows than it keeps."""
    assert session.slot is not None, "only a session in a slot has active rows"
    held = cache.rows_per_head(session.slot)
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
    held = cache.rows_per_head(session.slot)
    n_layers = cache.shape.n_layers
    group = session.method.shares_layers
    leaders = range(0, n_layers, group)
    full = [
        first
        for first in leaders
        if any(held[i] > session.target(i) for i in _group(first, group, n_layers))
    ]
    # Where tokens are ranked whole every layer has a say, also one that has nothing to evict.
    scored = list(leaders) if session.method.whole_tokens else full
    layers = {layer: active_rows(cache, session, observed, layer) for layer in scored}
    scores = dict(
        zip(
            scored,
            ranked(session.method, list(layers.values()), nearness(session.segments)),
            strict=True,
        )
    )
    leaving = torch.zeros(session.length, device=cache.device)
    for first in full:
        chosen = _choose(cache, session, settings, layers[first], scores[first], turn_over)
        sharing = _group(first, group, n_layers)
        leaving += _scores_of_leaving(chosen, session.length) * (len(sharing) / n_layers)
        for layer in sharing:
            places = chosen.places if layer == first else _places_in(cache, session, layer, chosen)
            cache.keep(session.slot, layer, places)
            assert cache.rows_per_head(session.slot)[layer] <= session.target(layer), (
                "a method keeps within its budget"
            )
    leaving = leaving.cpu()
    evicted = leaving != 0
    session.scores_of_evicted()[evicted] = leaving[evicted]


def _group(first: int, size: int, n_layers: int) -> range:
    return range(first, min(first + size, n_layers))


def active_rows(
    cache: ActiveCache, session: WorkerSession, observed: Observed, layer: int
) -> LayerRows:
    """A layer of the session's slot as its method sees it."""
    assert session.slot is not None, "only a session in a slot evicts"
    held = cache.read(session.slot, layer)
    none = held.keys.new_zeros(cache.shape.n_heads, 0, cache.shape.head_dim)
    return LayerRows(
        layer=layer,
        keys=held.keys,
        values=held.values,
        positions=held.positions,
        queries=observed.queries[layer] if observed.queries else none,
        query_positions=observed.positions.to(cache.device),
        accumulated=held.accumulated,
        end=session.length,
        seed=session.seed + session.length,
        extra_logsumexp=observed.extra_logsumexp[layer] if observed.extra_logsumexp else None,
    )


def _choose(
    cache: ActiveCache,
    session: WorkerSession,
    settings: WorkerSettings,
    rows: LayerRows,
    scores: Tensor,
    turn_over: bool,
) -> _Chosen:
    assert session.slot is not None, "only a session in a slot evicts"
    promoted = cache.read(session.slot, rows.layer).promoted
    stays = promoted | _protected(rows.positions, session, settings, rows.layer, turn_over)
    places = session.method.select(
        scores.masked_fill(stays, torch.inf), rows.positions, session.target(rows.layer)
    )
    return _Chosen(places, rows.positions.clone(), scores)


def _places_in(cache: ActiveCache, session: WorkerSession, layer: int, chosen: _Chosen) -> Tensor:
    """Where the chosen rows lie in another layer, as far as it holds them."""
    assert session.slot is not None, "only a session in a slot evicts"
    positions = cache.read(session.slot, layer).positions
    wanted = chosen.positions.gather(1, chosen.places.clamp(min=0)).masked_fill(
        chosen.places < 0, EMPTY
    )
    held = positions != EMPTY
    return mask_to_indices(
        held
        & position_mask(wanted, session.length).gather(
            1, positions.clamp(max=session.length - 1).long()
        )
    )


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
    scores = chosen.scores
    positions = chosen.positions
    places = chosen.places
    heads, n = positions.shape
    kept = torch.zeros(heads, n + 1, dtype=torch.bool, device=positions.device)
    kept.scatter_(1, torch.where(places < 0, n, places), True)
    leaves = (positions != EMPTY) & ~kept[:, :n]
    where = positions[leaves].long()
    total = torch.zeros(length, device=scores.device).index_add_(0, where, scores[leaves].float())
    return total / heads
