"""Eviction: score, select and keep rows until a session is within its budget."""

from dataclasses import dataclass

import torch
from torch import Tensor

from workers.cache.active_cache import EMPTY, ActiveCache
from workers.engine.eviction.ranking import rank_rows
from workers.engine.session import ResidentSession, WorkerSession
from workers.engine.settings import WorkerSettings
from workers.methods import LayerRows
from workers.parallel.group import Group
from workers.parallel.sums import sum_by_token
from workers.primitives.observation import Observed
from workers.primitives.selection import (
    gather_or_empty,
    is_among,
    mask_to_indices,
    protected,
)


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
    over = any(rows > session.target(layer) for layer, rows in enumerate(active))
    return resident.config.method.evicts and cache.group.some([over])[0]


def evict(
    cache: ActiveCache,
    resident: ResidentSession,
    settings: WorkerSettings,
    observed: Observed,
    *,
    turn_over: bool = False,
) -> int:
    """Reduce the session's slot to its target rows in every layer that exceeds it.

    Returns the rows per head that left the largest layer.

    Sinks, the recent window, promoted rows and, up to their share, the current turn's rows stay.
    The method ranks the others by the observed queries. Layers that share a selection keep the
    positions chosen in the first of them, and the rows promoted in them alone. `turn_over`: the
    turn's own rows are no longer protected.
    """
    session = resident.session
    n_layers = cache.shape.n_layers
    before = max(cache.rows_per_head(resident.slot))
    group_size = resident.config.method.shares_layers
    leaders = range(0, n_layers, group_size)
    full = _full_leaders(cache, resident, leaders)
    scores = _score_layers(cache, resident, observed, leaders, full)
    evicted = list[tuple[Tensor, Tensor]]()
    for leader in full:
        rows, ranks = scores[leader]
        choice = _choose_rows(cache, resident, settings, rows, ranks, turn_over)
        group = _group(leader, group_size, n_layers)
        evicted.append(_evicted_rows(choice, len(group) / n_layers))
        for layer in group:
            indices = choice.indices
            if layer != leader:
                indices = _follow(cache, resident, settings, layer, choice, turn_over)
            cache.keep(resident.slot, layer, indices)
            assert cache.rows_per_head(resident.slot)[layer] <= session.target(layer), (
                "a method keeps within its budget"
            )
    record_evicted(cache.group, session, evicted)
    return before - max(cache.rows_per_head(resident.slot))


def kept_by_position(
    resident: ResidentSession, settings: WorkerSettings, layer: int, length: int
) -> tuple[int, int] | None:
    """What an eviction leaves of a layer's `length` rows: the first, and those from a position on.

    Returns their number and that position; None for a method that selects by anything else.
    """
    rows = resident.config.layer_rows[layer]
    first = resident.config.method.first_kept(rows)
    if first is None:
        return None
    first = min(length, max(first, settings.sinks))
    return first, max(first, length - rows + first)


def select_by_position(
    resident: ResidentSession, settings: WorkerSettings, length: int, dropped: int = 0
) -> list[Tensor]:
    """Select of the first `length` rows those that evictions by position leave; all of other methods.

    dropped: rows that were computed behind them. Returns per layer positions, int64 `[m]`, ascending.
    """
    selected = []
    for layer in range(len(resident.config.layer_rows)):
        kept = kept_by_position(resident, settings, layer, length + dropped)
        first, newest = (min(each, length) for each in kept or (length, length))
        selected.append(torch.cat([torch.arange(first), torch.arange(newest, length)]))
    return selected


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
        group=cache.group,
    )


def _full_leaders(cache: ActiveCache, resident: ResidentSession, leaders: range) -> list[int]:
    """First layers of the groups in which some layer exceeds its target, on any rank."""
    session = resident.session
    active = cache.rows_per_head(resident.slot)
    full = [
        any(
            active[layer] > session.target(layer)
            for layer in _group(leader, leaders.step, len(active))
        )
        for leader in leaders
    ]
    return [each for each, is_full in zip(leaders, cache.group.some(full), strict=True) if is_full]


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
    ranks = rank_rows(method, layers, resident.session.episode.segments, cache.group)
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
    stays = promoted | protected_rows(rows.positions, session, settings, rows.layer, turn_over)
    indices = resident.config.method.select(
        scores.masked_fill(stays, torch.inf), rows.positions, session.target(rows.layer)
    )
    return _LayerChoice(indices, rows.positions.clone(), scores)


def _follow(
    cache: ActiveCache,
    resident: ResidentSession,
    settings: WorkerSettings,
    layer: int,
    choice: _LayerChoice,
    turn_over: bool,
) -> Tensor:
    """Slot indices of the rows to keep in a layer that shares another layer's `choice`.

    The chosen rows, as far as they are active here, and the rows that a repair promoted here alone.
    Where both are too many, the method selects among them by the other layer's scores.
    """
    session = resident.session
    rows = cache.read(resident.slot, layer)
    chosen = gather_or_empty(choice.positions, choice.indices)
    indices = mask_to_indices(is_among(rows.positions, chosen) | rows.promoted)
    target = session.target(layer)
    if int((indices >= 0).sum()) <= target * len(indices):
        return indices
    positions = gather_or_empty(rows.positions, indices)
    promoted = rows.promoted.gather(1, indices.clamp(min=0)) & (indices >= 0)
    stays = promoted | protected_rows(positions, session, settings, layer, turn_over)
    at = torch.searchsorted(choice.positions, positions).clamp(max=choice.positions.shape[1] - 1)
    scores = choice.scores.gather(1, at).masked_fill(stays, torch.inf)
    selected = resident.config.method.select(scores, positions, target)
    return torch.where(selected < 0, -1, indices.gather(1, selected.clamp(min=0)))


def protected_rows(
    positions: Tensor, session: WorkerSession, settings: WorkerSettings, layer: int, turn_over: bool
) -> Tensor:
    """Mask of the rows of a layer that stay whatever they score: bool `[n_kv_heads, n]`."""
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


def _evicted_rows(choice: _LayerChoice, weight: float) -> tuple[Tensor, Tensor]:
    """Tokens of the evicted rows, int64 `[k]`, and their share in the token's score, float64.

    A token's score is the mean over layers and heads; `weight` is the layers' share.
    """
    heads, n = choice.positions.shape
    device = choice.positions.device
    kept = torch.zeros(heads, n + 1, dtype=torch.bool, device=device)
    kept.scatter_(1, torch.where(choice.indices < 0, n, choice.indices), True)
    # As indices: each use of a mask would wait for the device.
    evicted = ((choice.positions != EMPTY) & ~kept[:, :n]).nonzero(as_tuple=True)
    return choice.positions[evicted], choice.scores[evicted].double() * weight / heads


def record_evicted(
    group: Group, session: WorkerSession, evicted: list[tuple[Tensor, Tensor]]
) -> None:
    """Record tokens of evicted rows, int `[k]`, with their shares in the tokens' scores, float64.

    group: each of its ranks has evicted rows of its own heads, whose mean its shares make up.
    """
    if not evicted:
        return
    rows = torch.cat([tokens for tokens, _ in evicted]).cpu()
    shares = torch.cat([shares for _, shares in evicted]).cpu()
    tokens, index = torch.unique(rows, return_inverse=True)
    own = torch.zeros(1, len(tokens), dtype=torch.float64).index_add_(1, index, shares[None])
    tokens, total = sum_by_token(group, tokens, own / group.count)
    session.record_evicted(tokens, total[0].float())
