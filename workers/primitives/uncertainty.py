"""Tokens whose selection is still ambiguous, given lower and upper bounds on their scores."""

import torch
from torch import Tensor

from workers.primitives.selection import DecayWindow, best_tokens


def ambiguous_tokens_diffused(
    lower: Tensor, upper: Tensor, candidates: Tensor, count: int, window: DecayWindow
) -> Tensor:
    """Tokens that may change the `count` best candidates by diffused score: bool `[length]`.

    lower, upper: bounds on the scores, float `[length]`; candidates: bool `[length]`. Utilities
    grow with the scores, so bounds on scores bound utilities. The ambiguous tokens are the anchors
    of candidates that may be selected or not; those with exact scores are left out.
    """
    ambiguous = torch.zeros_like(candidates)
    if int(candidates.sum()) <= count or not count:
        return ambiguous
    low, low_anchors = _diffuse_with_anchors(lower, window)
    high, high_anchors = _diffuse_with_anchors(upper, window)
    inside = torch.zeros_like(candidates)
    inside[best_tokens(low, candidates, high, count)] = True
    outside = candidates & ~inside
    may_leave = inside & (low <= high[outside].amax())
    may_enter = outside & (high >= low[inside].amin())
    undecided = may_leave | may_enter
    ambiguous[low_anchors[undecided]] = True
    ambiguous[high_anchors[undecided]] = True
    return ambiguous & (upper > lower)


def _diffuse_with_anchors(scores: Tensor, window: DecayWindow) -> tuple[Tensor, Tensor]:
    """Diffused scores of float `[length]`, and the anchor of each token's utility, int64."""
    length = scores.shape[0]
    indices = torch.arange(length)
    utility = scores.clone()
    anchors = indices.clone()
    for offset, decay in window.offsets():
        anchor = indices - offset
        exists = (anchor >= 0) & (anchor < length)
        decayed = scores[anchor.clamp(0, length - 1)] * decay
        decayed = torch.where(exists, decayed, -torch.inf)
        anchors = torch.where(decayed > utility, anchor, anchors)
        utility = torch.maximum(utility, decayed)
    return utility, anchors


def ambiguous_tokens_bursts(
    lower: Tensor, upper: Tensor, candidates: Tensor, count: int, *, before: int, after: int
) -> Tensor:
    """Tokens that may change the selection of `selection.bursts`: bool `[length]`.

    lower, upper: bounds on the scores, float `[length]`; candidates: bool `[length]`. An anchor is
    certain if its lower bound is above the upper bounds of all available candidates.
    """
    ambiguous = torch.zeros_like(candidates)
    if int(candidates.sum()) <= count:
        return ambiguous
    available = candidates.clone()
    chosen = 0
    midpoints = (lower + upper) / 2
    for anchor in best_tokens(midpoints, candidates, midpoints, 2 * count).tolist():
        if chosen >= count:
            break
        if not available[anchor]:
            continue
        rivals = available & (upper >= lower[anchor])
        rivals[anchor] = False
        if bool(rivals.any()):
            ambiguous |= rivals
            ambiguous[anchor] = True
        burst = slice(max(0, anchor - before), anchor + after + 1)
        chosen += int(available[burst].sum())
        available[burst] = False
    return ambiguous & (upper > lower)
