"""Which rows make an episode: pure functions of scores and positions."""

from dataclasses import dataclass

import torch
from torch import Tensor

from workers.cache.active_cache import EMPTY
from workers.methods import Method


@dataclass(frozen=True)
class LayerChoice:
    """What to choose a layer's rows with: the session's method, `rows` per KV head, and sinks, which always stay."""

    method: Method
    rows: int
    sinks: int


def choose_of_all(scores: Tensor, choice: LayerChoice) -> Tensor:
    """The method's own selection among all rows of a layer: int64 positions `[n_kv_heads, m]`, -1 at a head's end.

    scores: float32 `[n_kv_heads, n]`, one for each position.
    """
    positions = torch.arange(scores.shape[1], dtype=torch.int32, device=scores.device).expand(
        scores.shape[0], -1
    )
    return choose_places(scores, positions, choice)


def choose_with_newer(
    positions: Tensor, scores: Tensor, newer: Tensor, choice: LayerChoice
) -> Tensor:
    """An episode's rows and the newer ones beside them, within the budget: int64 positions, -1 at a head's end.

    positions int32, scores float32 `[n_kv_heads, m]`: the episode's, `EMPTY` where there is none; newer int32
    `[n_kv_heads, k]`: rows that came after it was built, ascending. Of these the newest stay, at most half the
    layer's rows, and the episode's lowest scores give way to them.
    """
    kept = newest(newer, choice.rows // 2)
    merged, order = torch.cat([positions, kept], dim=1).sort(dim=1, stable=True)
    ranked = torch.cat(
        [scores, torch.full_like(kept, torch.inf, dtype=torch.float32)], dim=1
    ).gather(1, order)
    places = choose_places(ranked, merged, choice)
    return torch.where(places < 0, -1, merged.gather(1, places.clamp(min=0)).long())


def newest(positions: Tensor, rows: int) -> Tensor:
    """Each head's `rows` last ones of int32 `[n_kv_heads, k]`; the others become `EMPTY`."""
    from_the_end = (positions != EMPTY).flip(1).cumsum(1).flip(1)
    return torch.where(from_the_end <= rows, positions, EMPTY)


def choose_places(scores: Tensor, positions: Tensor, choice: LayerChoice) -> Tensor:
    """The places that the method keeps of some rows of a layer; `base.Method.select` has the shapes."""
    sinks = positions < choice.sinks
    return choice.method.select(scores.masked_fill(sinks, torch.inf), positions, choice.rows)
