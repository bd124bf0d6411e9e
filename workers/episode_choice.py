"""Which rows make an episode: pure functions of scores and positions."""

from dataclasses import dataclass

import torch
from torch import Tensor

from workers.cache import EMPTY
from workers.methods import LayerRows, Method
from workers.selection import protected


@dataclass(frozen=True)
class LayerChoice:
    """What to choose a layer's rows with: the session's method, `rows` per KV head, and what it may not give up.

    `end` is the position after the newest row; sinks is a number of rows.
    """

    method: Method
    layer: int
    rows: int
    end: int
    sinks: int
    seed: int


def choose_of_all(scores: Tensor, choice: LayerChoice) -> Tensor:
    """The method's own selection among all rows of a layer: int64 positions `[n_kv_heads, m]`, -1 at a head's end.

    scores: float32 `[n_kv_heads, n]`, one for each position.
    """
    positions = torch.arange(scores.shape[1], dtype=torch.int32, device=scores.device).expand(scores.shape[0], -1)
    return choose_places(scores, positions, choice)


def choose_with_newer(positions: Tensor, scores: Tensor, newer: Tensor, choice: LayerChoice) -> Tensor:
    """An episode's rows and the newer ones beside them, within the budget: int64 positions, -1 at a head's end.

    positions int32, scores float32 `[n_kv_heads, m]`: the episode's, `EMPTY` where there is none; newer int32
    `[n_kv_heads, k]`: rows that came after it was built, ascending. Of these the newest stay, at most half the
    layer's rows, and the episode's lowest scores give way to them.
    """
    kept = newest(newer, choice.rows // 2)
    merged, order = torch.cat([positions, kept], dim=1).sort(dim=1, stable=True)
    ranked = torch.cat([scores, torch.full_like(kept, torch.inf, dtype=torch.float32)], dim=1).gather(1, order)
    places = choose_places(ranked, merged, choice)
    return torch.where(places < 0, -1, merged.gather(1, places.clamp(min=0)).long())


def newest(positions: Tensor, rows: int) -> Tensor:
    """Each head's `rows` last ones of int32 `[n_kv_heads, k]`; the others become `EMPTY`."""
    from_the_end = (positions != EMPTY).flip(1).cumsum(1).flip(1)
    return torch.where(from_the_end <= rows, positions, EMPTY)


def marks(positions: Tensor, length: int) -> Tensor:
    """Positions `[n_kv_heads, m]`, negative or `EMPTY` for none, as bool `[n_kv_heads, length]`."""
    marked = torch.zeros(positions.shape[0], length + 1, dtype=torch.bool, device=positions.device)
    where = torch.where(positions < 0, length, positions.clamp(max=length)).long()
    return marked.scatter_(1, where, True)[:, :length]


def listed(marked: Tensor) -> Tensor:
    """bool `[n_kv_heads, n]` as indices: int64 `[n_kv_heads, m]`, ascending, -1 at a shorter head's end."""
    n = marked.shape[1]
    indices = torch.where(marked, torch.arange(n, device=marked.device), n).sort(dim=1).values
    indices = indices[:, : int(marked.sum(1).max()) if marked.numel() else 0]
    return torch.where(indices < n, indices, -1)


def choose_places(scores: Tensor, positions: Tensor, choice: LayerChoice) -> Tensor:
    """The places that the method keeps of some rows of a layer; `base.Method.select` has the shapes."""
    held = positions != EMPTY
    kept = protected(positions, sinks=choice.sinks, recent=0, turn_start=choice.end, turn_rows=0, end=choice.end)
    nothing = torch.zeros((), device=scores.device).expand(*positions.shape, 0)
    rows = LayerRows(
        layer=choice.layer,
        keys=nothing,
        values=nothing,
        positions=positions,
        queries=nothing[:, :0],
        query_positions=positions[0, :0],
        accumulated=torch.zeros_like(scores),
        end=choice.end,
        seed=choice.seed,
    )
    return choice.method.select(scores.masked_fill(kept & held, torch.inf), rows, choice.rows)
