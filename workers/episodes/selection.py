"""Selection of an episode's rows: pure functions of scores and positions."""

from dataclasses import dataclass

import torch
from torch import Tensor

from workers.cache.active_cache import EMPTY
from workers.methods import Method


@dataclass(frozen=True)
class LayerSelector:
    """Selects a layer's rows by the session's method: `rows` per KV head; sinks always stay."""

    method: Method
    rows: int
    sinks: int


def select_from_all(scores: Tensor, selector: LayerSelector) -> Tensor:
    """Select among all rows of a layer: int64 positions `[n_kv_heads, m]`, -1 as padding.

    scores: float32 `[n_kv_heads, n]`, one for each position.
    """
    positions = torch.arange(scores.shape[1], dtype=torch.int32, device=scores.device)
    return select_indices(scores, positions.expand(scores.shape[0], -1), selector)


def select_with_newer(
    positions: Tensor, scores: Tensor, newer: Tensor, selector: LayerSelector
) -> Tensor:
    """Merge an episode's rows with newer ones, within the budget: int64 positions, -1 as padding.

    positions int32, scores float32 `[n_kv_heads, m]`: the episode's, `EMPTY` as padding; newer
    int32 `[n_kv_heads, k]`: rows after the episode's build, ascending. The newest of these stay, at
    most half the layer's rows, in place of the episode's rows of lowest score.
    """
    kept = newest(newer, selector.rows // 2)
    merged, order = torch.cat([positions, kept], dim=1).sort(dim=1, stable=True)
    kept_scores = torch.full_like(kept, torch.inf, dtype=torch.float32)
    merged_scores = torch.cat([scores, kept_scores], dim=1).gather(1, order)
    indices = select_indices(merged_scores, merged, selector)
    return torch.where(indices < 0, -1, merged.gather(1, indices.clamp(min=0)).long())


def newest(positions: Tensor, rows: int) -> Tensor:
    """Each head's last `rows` of int32 positions `[n_kv_heads, k]`; the others become `EMPTY`."""
    from_end = (positions != EMPTY).flip(1).cumsum(1).flip(1)
    return torch.where(from_end <= rows, positions, EMPTY)


def select_indices(scores: Tensor, positions: Tensor, selector: LayerSelector) -> Tensor:
    """Indices of the rows that the method keeps; shapes as in `Method.select`."""
    sinks = positions < selector.sinks
    return selector.method.select(scores.masked_fill(sinks, torch.inf), positions, selector.rows)
