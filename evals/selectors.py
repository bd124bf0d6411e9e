"""Selectors to compare the worker's own repair with (RepairKV 4.4, appendix C).

Each returns tokens of the context: int64 positions. Scores are the repair's own: the mean over
layers and heads of the largest attention weight that a token of the signal gives, sinks left out.
"""

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from workers.methods import RepairKV
from workers.primitives.observation import Observed
from workers.primitives.scoring import attention_in_chunks
from workers.primitives.selection import bursts

# The published bursts (RepairKV 3.3): tokens before and after an anchor.
BURST_BEFORE = 2
BURST_AFTER = 20
# Tokens that share a summary.
CHUNK = 16
# Tokens scored between two checks of the time limit.
SCAN_TOKENS = 64


def random_tokens(candidates: Tensor, count: int, seed: str) -> Tensor:
    """Random-K: `count` of the candidates, a function of the seed."""
    picks = random.Random(seed).sample(candidates.tolist(), min(count, len(candidates)))
    return torch.tensor(sorted(picks), dtype=torch.int64)


def oldest_tokens(candidates: Tensor, count: int) -> Tensor:
    """Oldest-K: the first `count` candidates, which are ascending."""
    return candidates[:count]


def nearest_tokens(candidates: Tensor, positions: Sequence[int], count: int) -> Tensor:
    """The `count` candidates nearest to any of `positions`; the earlier of a tie."""
    distance = (candidates[:, None] - torch.tensor(positions)).abs().amin(1)
    return candidates[distance.sort(stable=True).indices[:count]].sort().values


def select_bursts(scores: Tensor, candidates: Tensor, tie_break: Tensor, count: int) -> Tensor:
    """The published selection (RepairKV 3.3).

    `scores` and `tie_break` are float `[n]`, `candidates` int64 positions below n.
    """
    allowed = torch.zeros(len(scores), dtype=torch.bool)
    allowed[candidates] = True
    return bursts(scores, allowed, tie_break, count, before=BURST_BEFORE, after=BURST_AFTER)


def select_spread(scores: Tensor, candidates: Tensor, tie_break: Tensor, count: int) -> Tensor:
    """The worker's own selection, with the parameters of `select_bursts`."""
    allowed = torch.zeros(len(scores), dtype=torch.bool)
    allowed[candidates] = True
    operator = RepairKV()
    return operator.choose(operator.utility(scores), allowed, tie_break, count)


def signal_scores(observed: Observed, keys: Sequence[Tensor], rows: Tensor, sinks: int) -> Tensor:
    """Attention of a signal's queries to each token, float32 `[length]`.

    The softmax runs over `rows` (int64 positions) alone; scores of other tokens and of the first
    `sinks` tokens are 0. `keys` are per layer `[n_kv_heads, length, head_dim]`.
    """
    total = torch.zeros(len(rows))
    for queries, layer_keys in zip(observed.queries, keys, strict=True):
        visible = layer_keys[:, rows.to(layer_keys.device)]
        positions = rows.to(visible.device, torch.int32).expand(len(visible), -1)
        best: Tensor | None = None
        for _, weights in attention_in_chunks(queries, visible, positions, observed.positions):
            largest = weights.amax(2)
            best = largest if best is None else torch.maximum(best, largest)
        assert best is not None, "a signal has tokens"
        total += best.mean((0, 1)).cpu()
    scores = torch.zeros(keys[0].shape[1])
    scores[rows] = total / len(keys)
    scores[:sinks] = 0
    return scores


class ChunkSummaries:
    """Minimum and maximum of each channel over every chunk of keys, for Quest's bound."""

    def __init__(self, keys: Sequence[Tensor], context: int) -> None:
        self._chunks = -(-context // CHUNK)
        self._bounds = [self._layer_bounds(layer[:, :context].float()) for layer in keys]

    def rank(self, observed: Observed) -> list[int]:
        """Chunk numbers by the upper bound of their logits, best first.

        The bound is a mean over layers and heads.
        """
        utility = torch.zeros(self._chunks)
        for queries, (low, high) in zip(observed.queries, self._bounds, strict=True):
            n_heads, t, head_dim = queries.shape
            grouped = queries.float().reshape(len(low), -1, head_dim)
            positive = grouped.clamp(min=0) @ high.transpose(1, 2)
            negative = grouped.clamp(max=0) @ low.transpose(1, 2)
            per_head = (positive + negative).view(n_heads, t, -1) * head_dim**-0.5
            utility += per_head.amax(1).mean(0).cpu()
        return [int(chunk) for chunk in utility.sort(descending=True, stable=True).indices.tolist()]

    def _layer_bounds(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        missing = self._chunks * CHUNK - keys.shape[1]
        # The last token, repeated, fills the last chunk: its bounds do not change.
        full = torch.cat([keys, keys[:, -1:].expand(-1, missing, -1)], dim=1)
        parts = full.view(len(keys), self._chunks, CHUNK, -1)
        return parts.amin(2), parts.amax(2)


def tokens_of_first_chunks(chunks: Sequence[int], candidates: Tensor, least: int) -> Tensor:
    """The candidates in the first chunks of an order, at least `least` if there are so many.

    Returns int64 positions, ascending.
    """
    chunk_numbers = candidates // CHUNK
    selected = torch.zeros(len(candidates), dtype=torch.bool)
    for chunk in chunks:
        if int(selected.sum()) >= least:
            break
        selected |= chunk_numbers == chunk
    return candidates[selected]


def scores_until(
    observed: Observed,
    keys: Sequence[Tensor],
    active: Tensor,
    order: Tensor,
    sinks: int,
    is_late: Callable[[], bool],
) -> tuple[Tensor, Tensor]:
    """`signal_scores` over active tokens and as many tokens of `order` as fit before `is_late`.

    `active` and `order` are int64 positions. Returns the scores and the scored tokens of `order`.
    """
    parts = [active]
    logits = [_logits(observed, keys, active)]
    for part in torch.split(order, SCAN_TOKENS):
        if is_late():
            break
        parts.append(part)
        logits.append(_logits(observed, keys, part))
    total = torch.zeros(sum(map(len, parts)))
    for layer_logits in zip(*logits, strict=True):
        total += torch.cat(layer_logits, dim=-1).softmax(-1).amax(1).mean(0).cpu()
    scores = torch.zeros(keys[0].shape[1])
    scores[torch.cat(parts)] = total / len(keys)
    scores[:sinks] = 0
    return scores, torch.cat([order[:0], *parts[1:]])


def _logits(observed: Observed, keys: Sequence[Tensor], rows: Tensor) -> list[Tensor]:
    """Logits of the rows at these positions, per layer float32 `[n_heads, t, rows]`."""
    logits = []
    for queries, layer_keys in zip(observed.queries, keys, strict=True):
        visible = layer_keys[:, rows.to(layer_keys.device)].float()
        scale = queries.shape[-1] ** -0.5
        grouped = queries.float().reshape(len(visible), -1, queries.shape[-1]) * scale
        logits.append((grouped @ visible.transpose(1, 2)).view(*queries.shape[:2], -1))
    return logits
