"""Which scores must be known better before a choice is certain, where only bounds on them are known."""

import torch
from torch import Tensor

from workers.primitives.selection import best_tokens, fades


def ambiguous_tokens_spread(
    lower: Tensor,
    upper: Tensor,
    candidates: Tensor,
    count: int,
    before: int,
    after: int,
    fade_before: float,
    fade_after: float,
) -> Tensor:
    """Tokens that may yet change the `count` best candidates by `selection.spread`: bool `[length]`.

    lower, upper: bounds on the scores, float `[length]`; candidates: bool `[length]`. A worth grows with the scores, so
    bounds on these bound it. Doubtful are the anchors of candidates that may be in or out.
    """
    doubtful = torch.zeros_like(candidates)
    if int(candidates.sum()) <= count or not count:
        return doubtful
    window = fades(before, after, fade_before, fade_after)
    (low, low_anchors), (high, high_anchors) = _anchored(lower, window), _anchored(upper, window)
    inside = torch.zeros_like(candidates)
    inside[best_tokens(low, candidates, high, count)] = True
    outside = candidates & ~inside
    unsure = (inside & (low <= high[outside].amax())) | (outside & (high >= low[inside].amin()))
    doubtful[low_anchors[unsure]] = True
    doubtful[high_anchors[unsure]] = True
    return doubtful & (upper > lower)


def _anchored(scores: Tensor, window: list[tuple[int, float]]) -> tuple[Tensor, Tensor]:
    """`selection.spread` of scores float `[length]`, and the anchor from which each token has its worth, int64."""
    length = scores.shape[0]
    places = torch.arange(length)
    worth = scores.clone()
    anchors = places.clone()
    for distance, fade in window:
        anchor = places - distance
        there = (anchor >= 0) & (anchor < length)
        faded = torch.where(there, scores[anchor.clamp(0, length - 1)] * fade, -torch.inf)
        anchors = torch.where(faded > worth, anchor, anchors)
        worth = torch.maximum(worth, faded)
    return worth, anchors


def ambiguous_tokens_bursts(
    lower: Tensor, upper: Tensor, candidates: Tensor, count: int, *, before: int, after: int
) -> Tensor:
    """Tokens that may yet change what `selection.bursts` chooses: bool `[length]`.

    An anchor is certain when its lower bound is over the upper bounds of all that is still free.
    """
    doubtful = torch.zeros_like(candidates)
    if int(candidates.sum()) <= count:
        return doubtful
    free = candidates.clone()
    chosen = 0
    middle = (lower + upper) / 2
    for anchor in best_tokens(middle, candidates, middle, 2 * count).tolist():
        if chosen >= count:
            break
        if not free[anchor]:
            continue
        rivals = free & (upper >= lower[anchor])
        rivals[anchor] = False
        if bool(rivals.any()):
            doubtful |= rivals
            doubtful[anchor] = True
        window = slice(max(0, anchor - before), anchor + after + 1)
        chosen += int(free[window].sum())
        free[window] = False
    return doubtful & (upper > lower)
