"""Scores to indices, under a budget."""

import torch
from torch import Tensor

from workers.cache import EMPTY


def top_per_head(scores: Tensor, positions: Tensor, rows: int) -> Tensor:
    """The `rows` best rows of each KV head, in the order of their positions.

    scores float `[n_kv_heads, n]`, positions int `[n_kv_heads, n]` (`EMPTY`: no row). Ties go to the earlier row.
    Returns places int64 `[n_kv_heads, min(rows, n)]` ascending, -1 at the end of a head with fewer rows.
    """
    held = positions != EMPTY
    ranked = scores.masked_fill(~held, -torch.inf).sort(dim=1, descending=True, stable=True).indices
    best = ranked[:, :rows]
    width = scores.shape[1]
    best = torch.where(held.gather(1, best), best, width).sort(dim=1).values
    return torch.where(best < width, best, -1)


def protected(positions: Tensor, *, sinks: int, recent: int, turn_start: int, turn_rows: int, end: int) -> Tensor:
    """Rows that no score may evict: sinks, the recent window and the newest `turn_rows` of the current turn.

    positions int `[n_kv_heads, n]`; `end` is the position after the newest row. The turn's share is capped so that
    a turn longer than the budget still leaves room for what was said before. Returns bool `[n_kv_heads, n]`.
    """
    current = positions >= max(turn_start, end - turn_rows)
    return (positions < sinks) | (positions >= end - recent) | current


def bursts(scores: Tensor, candidates: Tensor, tie_break: Tensor, count: int, *, before: int, after: int) -> Tensor:
    """RepairKV's selection (section 3): the best rows as anchors, each with its neighbours, exactly `count` rows.

    scores, tie_break: float `[n]` per token; candidates: bool `[n]`, the tokens that may be chosen. Anchors come by
    score, then `tie_break`, then the lower position; a burst is the candidates in `anchor-before .. anchor+after`.
    The last burst is cut to what is left: its anchor, then what follows the anchor, then what precedes it. Fewer
    than `count` rows come back only when there are fewer candidates. Returns int64 positions, ascending.
    """
    order = _ranking(scores, candidates, tie_break)
    chosen: dict[int, None] = {}
    free = set(order)
    for anchor in order:
        if len(chosen) >= count:
            break
        if anchor not in free:
            continue
        around = [anchor, *range(anchor + 1, anchor + after + 1), *range(anchor - 1, anchor - before - 1, -1)]
        burst = [position for position in around if position in free][: count - len(chosen)]
        chosen.update(dict.fromkeys(burst))
        free.difference_update(burst)
    return torch.tensor(sorted(chosen), dtype=torch.int64)


def _ranking(scores: Tensor, candidates: Tensor, tie_break: Tensor) -> list[int]:
    """Candidates, best first. Three stable sorts from the least to the most significant key."""
    order = candidates.nonzero().flatten()
    order = order[tie_break[order].sort(descending=True, stable=True).indices]
    order = order[scores[order].sort(descending=True, stable=True).indices]
    return [int(i) for i in order.tolist()]
