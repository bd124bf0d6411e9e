"""Selection of rows and tokens by score, under a budget.

Row functions take scores, float `[n_kv_heads, n]`, and positions, int `[n_kv_heads, n]`, ascending
per head and `EMPTY` where there is no row. They return indices of rows, int64 `[n_kv_heads, m]`,
ascending, with -1 at the end of a head with fewer rows. Token functions take vectors `[length]`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.cache.active_cache import EMPTY


@dataclass(frozen=True)
class DecayWindow:
    """The neighbours of an anchor that share in its score, and the decay per token of distance.

    Attributes:
        before: Tokens in front of the anchor.
        after: Tokens behind the anchor.
        decay_before: Factor per token in front of the anchor, 0 to under 1.
        decay_after: Factor per token behind the anchor, 0 to under 1.
    """

    before: int
    after: int
    decay_before: float
    decay_after: float

    def offsets(self) -> Iterator[tuple[int, float]]:
        """Offsets from the anchor, itself excluded, with the decay at each."""
        for distance in range(1, self.after + 1):
            yield distance, self.decay_after**distance
        for distance in range(1, self.before + 1):
            yield -distance, self.decay_before**distance


def top_per_head(scores: Tensor, positions: Tensor, rows: int) -> Tensor:
    """Select the `rows` best rows of each KV head; ties go to the earlier row."""
    resident = positions != EMPTY
    return mask_to_indices(top_mask(scores.masked_fill(~resident, -torch.inf), rows) & resident)


def top_mask(scores: Tensor, rows: int) -> Tensor:
    """Mask of the `rows` best of each KV head, bool as `scores`; ties go to the earlier row."""
    rows = min(rows, scores.shape[1])
    if not rows:
        return torch.zeros_like(scores, dtype=torch.bool)
    # By the score of the last one that has room: a fraction of the time of sorting all rows.
    least = scores.topk(rows, dim=1).values[:, -1:]
    above = scores > least
    equal = scores == least
    room = rows - above.sum(1, keepdim=True)
    return above | (equal & (equal.cumsum(1) <= room))


def top_over_heads(scores: Tensor, positions: Tensor, rows: int, floor: int = 0) -> Tensor:
    """Select the `rows * n_kv_heads` best rows of all KV heads together.

    Rows with an infinite score come first, then each head's `floor` best, then the others; ties go
    to the lower head, then to the earlier row. A head may get more than `rows`.

    Source: AdaKV (Feng et al., 2024), section 3.
    """
    heads, n = scores.shape
    resident = positions != EMPTY
    ranks = torch.empty_like(positions, dtype=torch.int64)
    ranks.scatter_(
        1, _rank(scores, resident), torch.arange(n, device=scores.device).expand(heads, -1)
    )
    priority = (ranks < floor).int().masked_fill(scores.isposinf(), 2)
    priority = priority.masked_fill(~resident, -1).flatten()
    order = scores.flatten().sort(descending=True, stable=True).indices
    order = order[priority[order].sort(descending=True, stable=True).indices]
    chosen = torch.zeros(heads * n, dtype=torch.bool, device=scores.device)
    chosen[order[: rows * heads]] = True
    return mask_to_indices(chosen.view(heads, n) & resident)


def whole_chunks(scores: Tensor, positions: Tensor, rows: int, chunk: int) -> Tensor:
    """Select the best chunks of each KV head that fit into `rows` completely.

    A chunk is the resident rows at positions `i * chunk .. (i+1) * chunk - 1` with equal scores;
    protected rows and the window have other scores and are kept on their own. Chunks are taken in
    the order of their scores, the earlier of equal ones first, up to the first that does not fit.
    If `rows` is smaller than a chunk, a part of the best one is taken.

    Source: ChunkKV (Liu et al., 2025), Algorithm 1.
    """
    resident = positions != EMPTY
    order = _rank(scores, resident)
    chosen = torch.zeros_like(resident).scatter_(1, order[:, :rows], True) & resident
    if chunk <= rows < scores.shape[1]:
        first_out = order[:, rows : rows + 1]
        split_chunk = positions // chunk == positions.gather(1, first_out) // chunk
        split_chunk &= (scores == scores.gather(1, first_out)) & ~scores.isposinf()
        chosen &= ~split_chunk
    return mask_to_indices(chosen)


def newest_first(scores: Tensor, positions: Tensor, rows: int) -> Tensor:
    """Raise each head's `rows` newest rows above all others, the newest highest.

    Infinite scores stay above. Returns scores of the same shape.
    """
    resident = positions != EMPTY
    indices = torch.arange(scores.shape[1], device=scores.device)
    newest = resident & (indices >= resident.sum(1, keepdim=True) - rows) & ~scores.isposinf()
    finite = scores.masked_fill(~resident | scores.isposinf(), 0.0)
    best = finite.amax() if finite.numel() else finite.sum()
    return torch.where(newest, best.clamp(min=0) + 1 + indices, scores)


def protected(
    positions: Tensor, *, sinks: int, recent: int, turn_start: int, turn_rows: int, end: int
) -> Tensor:
    """Mask of rows that must not be evicted: bool `[n_kv_heads, n]`.

    These are the first `sinks` rows, the last `recent` rows, and the newest `turn_rows` rows of the
    current turn. The turn's share is limited so that a turn longer than the budget leaves room for
    earlier rows. `end` is the position after the newest row.
    """
    current = positions >= max(turn_start, end - turn_rows)
    return (positions < sinks) | (positions >= end - recent) | current


def bursts(
    scores: Tensor, candidates: Tensor, tie_break: Tensor, count: int, *, before: int, after: int
) -> Tensor:
    """Select the best tokens as anchors, each with its neighbours, `count` tokens in total.

    scores, tie_break: float `[length]`; candidates: bool `[length]`, the tokens that may be
    selected. Anchors come by score, then `tie_break`, then the lower position; a burst is the
    candidates in `anchor-before .. anchor+after`. The last burst is truncated: its anchor first,
    then the tokens behind it, then those in front of it. Fewer than `count` tokens are returned
    only if there are fewer candidates. Returns int64 positions, ascending.

    Source: RepairKV, section 3.
    """
    n = len(candidates)
    available = candidates.clone()
    chosen: list[int] = []
    # At most half of twice as many anchors as wanted lie in the bursts of the other half.
    for anchor in best_tokens(scores, candidates, tie_break, 2 * count).tolist():
        if len(chosen) >= count:
            break
        if not available[anchor]:
            continue
        behind = range(anchor + 1, min(anchor + after + 1, n))
        in_front = range(anchor - 1, max(anchor - before - 1, -1), -1)
        burst = torch.tensor([anchor, *behind, *in_front], device=candidates.device)
        burst = burst[available[burst]][: count - len(chosen)]
        chosen += burst.tolist()
        available[burst] = False
    return torch.tensor(sorted(chosen), dtype=torch.int64)


def diffuse_scores(scores: Tensor, window: DecayWindow) -> Tensor:
    """Spread each score to neighbouring tokens: `max over p of scores_p * decay(i - p)`.

    scores: float `[..., n]`, 0 or more. `decay` is 1 for the anchor itself and 0 outside `window`.
    Returns a tensor of the same shape.
    """
    utility = scores.clone()
    n = scores.shape[-1]
    for offset, decay in window.offsets():
        if abs(offset) >= n:
            continue
        targets = slice(offset, None) if offset > 0 else slice(None, offset)
        anchors = slice(None, -offset) if offset > 0 else slice(-offset, None)
        utility[..., targets] = torch.maximum(utility[..., targets], scores[..., anchors] * decay)
    return utility


def best_tokens(scores: Tensor, candidates: Tensor, tie_break: Tensor, count: int) -> Tensor:
    """Select the `count` best candidates: int64 positions, best first.

    scores, tie_break: float `[n]`; candidates: bool `[n]`. Ties go by `tie_break`, then to the
    lower position.
    """
    order = candidates.nonzero().flatten()
    if not count:
        return order[:0]
    if count < len(order):
        # A top-k first: sorting a million tokens by three keys for the best hundred is slower.
        threshold = scores[order].topk(count).values.min()
        order = order[scores[order] >= threshold]
    order = order[tie_break[order].sort(descending=True, stable=True).indices]
    order = order[scores[order].sort(descending=True, stable=True).indices]
    return order[:count]


def mask_to_indices(mask: Tensor) -> Tensor:
    """Convert a mask, bool `[n_kv_heads, n]`, to indices, int64 `[n_kv_heads, m]`, -1 for none."""
    counts = mask.sum(1)
    width = int(counts.max()) if mask.numel() else 0
    indices = torch.full((len(mask), width), -1, dtype=torch.int64, device=mask.device)
    heads, rows = mask.nonzero(as_tuple=True)
    places = torch.arange(len(rows), device=mask.device) - (counts.cumsum(0) - counts)[heads]
    indices[heads, places] = rows
    return indices


def is_among(positions: Tensor, chosen: Tensor) -> Tensor:
    """Mask of the rows whose positions are among the head's chosen ones: bool `[n_kv_heads, n]`.

    positions int `[n_kv_heads, n]` and chosen int `[n_kv_heads, m]`, both on one device; chosen is
    ascending, with -1 in front or `EMPTY` at the end for none. Absent rows are not among them.
    """
    if not chosen.numel():
        return torch.zeros_like(positions, dtype=torch.bool)
    wanted = positions.to(chosen.dtype).contiguous()
    at = torch.searchsorted(chosen.contiguous(), wanted).clamp(max=chosen.shape[1] - 1)
    return (chosen.gather(1, at) == wanted) & (positions != EMPTY) & (positions >= 0)


def gather_or_empty(values: Tensor, indices: Tensor) -> Tensor:
    """Gather positions, int `[n_kv_heads, n]`, at indices `[n_kv_heads, m]`; `EMPTY` for -1."""
    return values.gather(1, indices.clamp(min=0)).masked_fill(indices < 0, EMPTY)


def position_mask(positions: Tensor, length: int) -> Tensor:
    """Convert positions `[n_kv_heads, m]` to a mask, bool `[n_kv_heads, length]`.

    Negative and `EMPTY` positions are ignored.
    """
    # One extra column takes the ignored positions, and is dropped.
    mask = torch.zeros(positions.shape[0], length + 1, dtype=torch.bool, device=positions.device)
    columns = torch.where(positions < 0, length, positions.clamp(max=length)).long()
    return mask.scatter_(1, columns, True)[:, :length]


def _rank(scores: Tensor, resident: Tensor) -> Tensor:
    """Indices of each head's rows, best first, ties the earlier first; absent rows last."""
    masked = scores.masked_fill(~resident, -torch.inf)
    return masked.sort(dim=1, descending=True, stable=True).indices
