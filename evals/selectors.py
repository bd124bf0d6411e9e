"""Other ways to choose what comes back, to measure the worker's own against (RepairKV 4.4, appendix C).

Each returns tokens of the context: int64 positions. Scores are the repair's own: the mean over layers and heads of the
largest attention weight that a signal's token gives, the sinks left out.
"""

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from workers.methods import RepairKV
from workers.primitives.observation import Observed
from workers.primitives.scoring import attention_in_chunks
from workers.primitives.selection import bursts

BEFORE = 2
AFTER = 20
"""The published bursts (RepairKV 3.3)."""
CHUNK = 16
"""Tokens that share a summary."""
SCAN_TOKENS = 64
"""Tokens that are scored before the clock is looked at."""


def evenly_random(candidates: Tensor, count: int, seed: str) -> Tensor:
    """Random-K: any of the candidates, a function of the seed."""
    picks = random.Random(seed).sample(candidates.tolist(), min(count, len(candidates)))
    return torch.tensor(sorted(picks), dtype=torch.int64)


def oldest(candidates: Tensor, count: int) -> Tensor:
    """Oldest-K: candidates are ascending."""
    return candidates[:count]


def nearest(candidates: Tensor, places: Sequence[int], count: int) -> Tensor:
    """The candidates nearest to any of some places; ties the earlier."""
    distance = (candidates[:, None] - torch.tensor(places)).abs().amin(1)
    return candidates[distance.sort(stable=True).indices[:count]].sort().values


def best_bursts(scores: Tensor, candidates: Tensor, tie_break: Tensor, count: int) -> Tensor:
    """The published selection; scores, tie_break float `[n]`, candidates int64 positions under n."""
    allowed = torch.zeros(len(scores), dtype=torch.bool)
    allowed[candidates] = True
    return bursts(scores, allowed, tie_break, count, before=BEFORE, after=AFTER)


def best_spread(scores: Tensor, candidates: Tensor, tie_break: Tensor, count: int) -> Tensor:
    """The worker's own selection, as `best_bursts`."""
    allowed = torch.zeros(len(scores), dtype=torch.bool)
    allowed[candidates] = True
    operator = RepairKV()
    return operator.choose(operator.utility(scores), allowed, tie_break, count)


def signal_scores(observed: Observed, keys: Sequence[Tensor], rows: Tensor, sinks: int) -> Tensor:
    """What a signal's queries give each token, their softmax over `rows` alone: float32 `[length]`, 0 elsewhere.

    keys: per layer `[n_kv_heads, length, head_dim]`; rows: int64 positions.
    """
    total = torch.zeros(len(rows))
    for queries, of_layer in zip(observed.queries, keys, strict=True):
        seen = of_layer[:, rows.to(of_layer.device)]
        places = rows.to(seen.device, torch.int32).expand(len(seen), -1)
        best: Tensor | None = None
        for _, weights in attention_in_chunks(queries, seen, places, observed.positions):
            most = weights.amax(2)
            best = most if best is None else torch.maximum(best, most)
        assert best is not None, "a signal has tokens"
        total += best.mean((0, 1)).cpu()
    scores = torch.zeros(keys[0].shape[1])
    scores[rows] = total / len(keys)
    scores[:sinks] = 0
    return scores


class Summaries:
    """The least and the greatest of each channel over every chunk of keys, for Quest's bound."""

    def __init__(self, keys: Sequence[Tensor], context: int) -> None:
        self._chunks = -(-context // CHUNK)
        self._bounds = [self._of_layer(of_layer[:, :context].float()) for of_layer in keys]

    def ranked(self, observed: Observed) -> list[int]:
        """The chunks, by what a query can at most find in them: the mean over layers and heads, best first."""
        worth = torch.zeros(self._chunks)
        for queries, (low, high) in zip(observed.queries, self._bounds, strict=True):
            grouped = queries.float().reshape(len(low), -1, queries.shape[-1])
            bound = grouped.clamp(min=0) @ high.transpose(1, 2) + grouped.clamp(
                max=0
            ) @ low.transpose(1, 2)
            per_head = (
                bound.view(queries.shape[0], queries.shape[1], -1) * queries.shape[-1] ** -0.5
            )
            worth += per_head.amax(1).mean(0).cpu()
        return [int(chunk) for chunk in worth.sort(descending=True, stable=True).indices.tolist()]

    def _of_layer(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        missing = self._chunks * CHUNK - keys.shape[1]
        # The last token once more fills the last chunk: its bounds stay as they are.
        full = torch.cat([keys, keys[:, -1:].expand(-1, missing, -1)], dim=1)
        parts = full.view(len(keys), self._chunks, CHUNK, -1)
        return parts.amin(2), parts.amax(2)


def visited(chunks: Sequence[int], candidates: Tensor, least: int) -> Tensor:
    """The candidates in the first chunks of an order, until there are at least so many: int64 ascending."""
    chunk_of = candidates // CHUNK
    found = torch.zeros(len(candidates), dtype=torch.bool)
    for chunk in chunks:
        if int(found.sum()) >= least:
            break
        found |= chunk_of == chunk
    return candidates[found]


def scores_in_time(
    observed: Observed,
    keys: Sequence[Tensor],
    active: Tensor,
    order: Tensor,
    sinks: int,
    late: Callable[[], bool],
) -> tuple[Tensor, Tensor]:
    """`signal_scores` over what is active and as many tokens of an order as can be scored until it is late.

    active, order: int64 positions. Returns the scores, and which tokens of the order have one.
    """
    parts = [active]
    logits = [_logits(observed, keys, active)]
    for part in torch.split(order, SCAN_TOKENS):
        if late():
            break
        parts.append(part)
        logits.append(_logits(observed, keys, part))
    total = torch.zeros(sum(map(len, parts)))
    for of_layer in zip(*logits, strict=True):
        total += torch.cat(of_layer, dim=-1).softmax(-1).amax(1).mean(0).cpu()
    scores = torch.zeros(keys[0].shape[1])
    scores[torch.cat(parts)] = total / len(keys)
    scores[:sinks] = 0
    return scores, torch.cat([order[:0], *parts[1:]])


def _logits(observed: Observed, keys: Sequence[Tensor], rows: Tensor) -> list[Tensor]:
    """Per layer float32 `[n_heads, t, rows]`."""
    found = []
    for queries, of_layer in zip(observed.queries, keys, strict=True):
        seen = of_layer[:, rows.to(of_layer.device)].float()
        grouped = (
            queries.float().reshape(len(seen), -1, queries.shape[-1]) * queries.shape[-1] ** -0.5
        )
        found.append((grouped @ seen.transpose(1, 2)).view(*queries.shape[:2], -1))
    return found
