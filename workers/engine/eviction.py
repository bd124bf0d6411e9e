"""Eviction: score, select and keep rows until a session is within its budget."""

from dataclasses import dataclass

import torch
from torch import Tensor

from workers.cache.active_cache import EMPTY, ActiveCache
from workers.engine.ranking import rank_rows
from workers.engine.session import ResidentSession, WorkerSession, episode_similarity
from workers.engine.settings import WorkerSettings
from workers.methods import LayerRows
from workers.primitives.observation import Observed
from workers.primitives.selection import mask_to_indices, position_mask, protected


@dataclass(frozen=True)
class _LayerChoice:
    """One layer's eviction: slot indices of the rows to keep, all rows' positions and scores."""

    indices: Tensor
    positions: Tensor
    scores: Tensor


def over_budget(cache: ActiveCache, resident: ResidentSession) -> bool:
    """Check if some layer of the session's slot has more rows than an eviction keeps."""
    session = resident.session
    active = cache.rows_per_head(resident.slot)
    return resident.config.method.evicts and any(
        rows > session.target(layer) for layer, rows in enumerate(active)
    )


def evict(
    cache: ActiveCache,
    resident: ResidentSession,
    settings: WorkerSettings,
    observed: Observed,
    *,
    turn_over: bool = False,
) -> None:
    """Reduce the session's slot to its target rows in every layer that exceeds it.

    Sinks, the recent window, promoted rows and, up to their share, the current turn's rows stay.
    The method ranks the others by the observed queries. Layers that share a selection keep the
    positions chosen in the first of them. `turn_over`: the turn's own rows are no longer protected.
    """
    session = resident.session
    n_layers = cache.shape.n_layers
    group_size = resident.config.method.shares_layers
    leaders = range(0, n_layers, group_size)
    full = _full_leaders(cache, resident, leaders)
    scores = _score_layers(cache, resident, observed, leaders, full)
    evicted_scores = torch.zeros(session.length, device=cache.device)
    for leader in full:
        rows, ranks = scores[leader]
        choice = _choose_rows(cache, resident, settings, rows, ranks, turn_over)
        group = _group(leader, group_size, n_layers)
        weight = len(group) / n_layers
        evicted_scores += _scores_of_evicted(choice, session.length) * weight
        for layer in group:
            indices = choice.indices
            if layer != leader:
                indices = _find_indices(cache, resident, layer, choice)
            cache.keep(resident.slot, layer, indices)
            assert cache.rows_per_head(resident.slot)[layer] <= session.target(layer), (
                "a method keeps within its budget"
            )
    evicted_scores = evicted_scores.cpu()
    evicted = evicted_scores != 0
    session.scores_of_evicted()[evicted] = evicted_scores[evicted]


def active_rows(
    cache: ActiveCache, resident: ResidentSession, observed: Observed, layer: int
) -> LayerRows:
    """Read a layer of the session's slot in the form that methods score."""
    session = resident.session
    rows = cache.read(resident.slot, layer)
    no_queries = rows.keys.new_zeros(cache.shape.n_heads, 0, cache.shape.head_dim)
    return LayerRows(
        layer=layer,
        keys=rows.keys,
        values=rows.values,
        positions=rows.positions,
        queries=observed.queries[layer] if observed.queries else no_queries,
        query_positions=observed.positions.to(cache.device),
        accumulated=rows.accumulated,
        end=session.length,
        seed=resident.config.seed + session.length,
        extra_logsumexp=observed.extra_logsumexp[layer] if observed.extra_logsumexp else None,
    )


def _full_leaders(cache: ActiveCache, resident: ResidentSession, leaders: range) -> list[int]:
    """First layers of the groups in which some layer exceeds its target."""
    session = resident.session
    active = cache.rows_per_head(resident.slot)
    return [
        leader
        for leader in leaders
        if any(
            active[layer] > session.target(layer)
            for layer in _group(leader, leaders.step, len(active))
        )
    ]


def _score_layers(
    cache: ActiveCache,
    resident: ResidentSession,
    observed: Observed,
    leaders: range,
    full: list[int],
) -> dict[int, tuple[LayerRows, Tensor]]:
    """Rows and ranks of the layers that evict, by layer.

    Methods that rank whole tokens score every group, also one that has nothing to evict.
    """
    method = resident.config.method
    scored = list(leaders) if method.whole_tokens else full
    layers = [active_rows(cache, resident, observed, layer) for layer in scored]
    similarity = episode_similarity(resident.session.episode.segments)
    ranks = rank_rows(method, layers, similarity)
    return dict(zip(scored, zip(layers, ranks, strict=True), strict=True))


def _group(first: int, size: int, n_layers: int) -> range:
    return range(first, min(first + size, n_layers))


def _choose_rows(
    cache: ActiveCache,
    resident: ResidentSession,
    settings: WorkerSettings,
    rows: LayerRows,
    scores: Tensor,
    turn_over: bool,
) -> _LayerChoice:
    session = resident.session
    promoted = cache.read(resident.slot, rows.layer).promoted
    stays = promoted | _protected(rows.positions, session, settings, rows.layer, turn_over)
    indices = resident.config.method.select(
        scores.masked_fill(stays, torch.inf), rows.positions, session.target(rows.layer)
    )
    return _LayerChoice(indices, rows.positions.clone(), scores)


def _find_indices(
    cache: ActiveCache, resident: ResidentSession, layer: int, choice: _LayerChoice
) -> Tensor:
    """Slot indices of the chosen rows in another layer, as far as they are active there."""
    length = resident.session.length
    positions = cache.read(resident.slot, layer).positions
    wanted = choice.positions.gather(1, choice.indices.clamp(min=0))
    wanted = wanted.masked_fill(choice.indices < 0, EMPTY)
    is_row = positions != EMPTY
    is_wanted = position_mask(wanted, length).gather(1, positions.clamp(max=length - 1).long())
    return mask_to_indices(is_row & is_wanted)


def _protected(
    positions: Tensor, session: WorkerSession, settings: WorkerSettings, layer: int, turn_over: bool
) -> Tensor:
    turn_rows = int(session.config.layer_rows[layer] * settings.turn_share)
    share = turn_rows - settings.sinks - settings.recent
    return protected(
        positions,
        sinks=settings.sinks,
        recent=settings.recent,
        turn_start=session.turn_start,
        turn_rows=0 if turn_over else max(0, share),
        end=session.length,
    )


def _scores_of_evicted(choice: _LayerChoice, length: int) -> Tensor:
    """Mean score over the heads of each evicted token: float32 `[length]`, 0 for the others.

    A repair breaks its ties with it (RepairKV Algorithm 1).
    """
    heads, n = choice.positions.shape
    device = choice.positions.device
    kept = torch.zeros(heads, n + 1, dtype=torch.bool, device=device)
    kept.scatter_(1, torch.where(choice.indices < 0, n, choice.indices), True)
    evicted = (choice.positions != EMPTY) & ~kept[:, :n]
    tokens = choice.positions[evicted].long()
    total = torch.zeros(length, device=choice.scores.device)
    return total.index_add_(0, tokens, choice.scores[evicted].float()) / heads
