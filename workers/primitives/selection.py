"""Scores to indices, under a budget."""

import torch
from torch import Tensor

from workers.cache.active_cache import EMPTY


def top_per_head(scores: Tensor, positions: Tensor, rows: int) -> Tensor:
    """The `rows` best rows of each KV head, in the order of their positions.

    scores float `[n_kv_heads, n]`, positions int `[n_kv_heads, n]` (`EMPTY`: no row). Ties go to the earlier row.
    Returns places int64 `[n_kv_heads, min(rows, n)]` ascending, -1 at the end of a head with fewer rows.
    """
    held = positions != EMPTY
    best = _ranked(scores, held)[:, :rows]
    width = scores.shape[1]
    best = torch.where(held.gather(1, best), best, width).sort(dim=1).values
    return torch.where(best < width, best, -1)


def top_over_heads(scores: Tensor, positions: Tensor, rows: int, floor: int = 0) -> Tensor:
    """The `rows * n_kv_heads` best rows of all KV heads together; each head's `floor` best go before the others.

    Shapes as in `top_per_head`, but a head may get more than `rows`. Rows with an infinite score go before all;
    ties go to the lower head, then to the earlier row. Source: AdaKV (Feng et al., 2024), section 3.
    """
    heads, n = scores.shape
    held = positions != EMPTY
    ranks = torch.empty_like(positions, dtype=torch.int64)
    ranks.scatter_(
        1, _ranked(scores, held), torch.arange(n, device=scores.device).expand(heads, -1)
    )
    tier = (ranks < floor).int().masked_fill(scores.isposinf(), 2).masked_fill(~held, -1).flatten()
    order = scores.flatten().sort(descending=True, stable=True).indices
    order = order[tier[order].sort(descending=True, stable=True).indices]
    chosen = torch.zeros(heads * n, dtype=torch.bool, device=scores.device)
    chosen[order[: rows * heads]] = True
    return mask_to_indices(chosen.view(heads, n) & held)


def whole_chunks(scores: Tensor, positions: Tensor, rows: int, chunk: int) -> Tensor:
    """The best chunks of each KV head that fit into `rows`, none of them in part (ChunkKV, Algorithm 1).

    Shapes as in `top_per_head`. A chunk is the held rows at positions `i * chunk .. (i+1) * chunk - 1` that have
    the same score: protected rows and the window have others and are kept on their own. Chunks are taken in the
    order of their scores, ties the earlier first, up to the first that does not fit; `rows` under a chunk are
    filled with a part of the best one.
    """
    held = positions != EMPTY
    order = _ranked(scores, held)
    chosen = torch.zeros_like(held).scatter_(1, order[:, :rows], True) & held
    if chunk <= rows < scores.shape[1]:
        first_out = order[:, rows : rows + 1]
        torn = positions // chunk == positions.gather(1, first_out) // chunk
        torn &= (scores == scores.gather(1, first_out)) & ~scores.isposinf()
        chosen &= ~torn
    return mask_to_indices(chosen)


def newest_first(scores: Tensor, positions: Tensor, rows: int) -> Tensor:
    """Scores in which each head's `rows` newest rows rank before all others, the newest first.

    Shapes as in `top_per_head`. Infinite scores stay above.
    """
    held = positions != EMPTY
    places = torch.arange(scores.shape[1], device=scores.device)
    newest = held & (places >= held.sum(1, keepdim=True) - rows) & ~scores.isposinf()
    best = (
        scores.masked_fill(~held | scores.isposinf(), 0.0).amax()
        if scores.numel()
        else scores.sum()
    )
    return torch.where(newest, best.clamp(min=0) + 1 + places, scores)


def protected(
    positions: Tensor, *, sinks: int, recent: int, turn_start: int, turn_rows: int, end: int
) -> Tensor:
    """Rows that no score may evict: sinks, the recent window and the newest `turn_rows` of the current turn.

    positions int `[n_kv_heads, n]`; `end` is the position after the newest row. The turn's share is capped so that
    a turn longer than the budget still leaves room for what was said before. Returns bool `[n_kv_heads, n]`.
    """
    current = positions >= max(turn_start, end - turn_rows)
    return (positions < sinks) | (positions >= end - recent) | current


def bursts(
    scores: Tensor, candidates: Tensor, tie_break: Tensor, count: int, *, before: int, after: int
) -> Tensor:
    """RepairKV's selection (section 3): the best rows as anchors, each with its neighbours, exactly `count` rows.

    scores, tie_break: float `[n]` per token; candidates: bool `[n]`, the tokens that may be chosen. Anchors come by
    score, then `tie_break`, then the lower position; a burst is the candidates in `anchor-before .. anchor+after`.
    The last burst is cut to what is left: its anchor, then what follows the anchor, then what precedes it. Fewer
    than `count` rows come back only when there are fewer candidates. Returns int64 positions, ascending.
    """
    chosen: dict[int, None] = {}

    def is_free(position: int) -> bool:
        return (
            0 <= position < len(candidates)
            and bool(candidates[position])
            and position not in chosen
        )

    # Of twice as many as are wanted at most one half is in the bursts of the other.
    for anchor in best_tokens(scores, candidates, tie_break, 2 * count).tolist():
        if len(chosen) >= count:
            break
        if not is_free(anchor):
            continue
        around = [
            anchor,
            *range(anchor + 1, anchor + after + 1),
            *range(anchor - 1, anchor - before - 1, -1),
        ]
        burst = [position for position in around if is_free(position)]
        chosen.update(dict.fromkeys(burst[: count - len(chosen)]))
    return torch.tensor(sorted(chosen), dtype=torch.int64)


def spread(
    scores: Tensor, before: int, after: int, fade_before: float, fade_after: float
) -> Tensor:
    """What tokens are worth for being near high scores: `max over p of scores_p * fade(i - p)`, float `[..., n]`.

    `fade(d)` is `fade_after ** d` for a token up to `after` behind the anchor, `fade_before ** -d` up to `before` ahead
    of it, 1 for the anchor itself, else 0. Scores are 0 or more.
    """
    worth = scores.clone()
    n = scores.shape[-1]
    for distance, fade in fades(before, after, fade_before, fade_after):
        if abs(distance) >= n:
            continue
        if distance > 0:
            worth[..., distance:] = torch.maximum(
                worth[..., distance:], scores[..., :-distance] * fade
            )
        else:
            worth[..., :distance] = torch.maximum(
                worth[..., :distance], scores[..., -distance:] * fade
            )
    return worth


def fades(
    before: int, after: int, fade_before: float, fade_after: float
) -> list[tuple[int, float]]:
    """The distances from an anchor that share in its score, with the share; the anchor itself is not among them."""
    behind = [(distance, fade_after**distance) for distance in range(1, after + 1)]
    return behind + [(-distance, fade_before**distance) for distance in range(1, before + 1)]


def best_tokens(scores: Tensor, candidates: Tensor, tie_break: Tensor, count: int) -> Tensor:
    """The `count` best candidates, best first: by score, then `tie_break`, then the lower position; int64.

    scores, tie_break: float `[n]`; candidates: bool `[n]`.
    """
    order = candidates.nonzero().flatten()
    if count < len(order):
        # Sorting a million tokens by three keys for the best hundred would take longer than finding these.
        order = (
            order[scores[order] >= scores[order].topk(count).values.min()] if count else order[:0]
        )
    order = order[tie_break[order].sort(descending=True, stable=True).indices]
    order = order[scores[order].sort(descending=True, stable=True).indices]
    return order[:count]


def _ranked(scores: Tensor, held: Tensor) -> Tensor:
    """Places of each head's rows, best first, ties the earlier first; rows that are not there last."""
    return scores.masked_fill(~held, -torch.inf).sort(dim=1, descending=True, stable=True).indices


def mask_to_indices(chosen: Tensor) -> Tensor:
    """bool `[n_kv_heads, n]` as places: int64 `[n_kv_heads, m]` ascending, -1 at a shorter head's end."""
    n = chosen.shape[1]
    places = torch.where(chosen, torch.arange(n, device=chosen.device), n).sort(dim=1).values
    places = places[:, : int(chosen.sum(1).max()) if chosen.numel() else 0]
    return torch.where(places < n, places, -1)


def position_mask(positions: Tensor, length: int) -> Tensor:
    """Positions `[n_kv_heads, m]`, negative or `EMPTY` for none, as bool `[n_kv_heads, length]`."""
    # One column more takes what is no position, and is cut off.
    marked = torch.zeros(positions.shape[0], length + 1, dtype=torch.bool, device=positions.device)
    where = torch.where(positions < 0, length, positions.clamp(max=length)).long()
    return marked.scatter_(1, where, True)[:, :length]
