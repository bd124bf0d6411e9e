"""Refresh and page summary under a time limit, which bounds the evicted tokens that they score."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from evals import selectors
from evals.conditions import BaselineState, ConditionResult
from evals.selectors import ChunkSummaries
from workers.primitives.observation import Observed


@dataclass(frozen=True)
class TimedResult:
    """A condition's result, the share of evicted tokens scored for it, and the seconds it took."""

    result: ConditionResult
    scanned: float
    seconds: float


class _TimeLimit:
    """A limit of `seconds` from now on."""

    def __init__(self, seconds: float) -> None:
        self._limit = seconds
        self._started = time.perf_counter()

    def spent(self) -> float:
        return time.perf_counter() - self._started

    def is_over(self) -> bool:
        return self.spent() >= self._limit


def refresh_in_time(baseline: BaselineState, k: int, seconds: float) -> TimedResult:
    """Refresh that scores evicted tokens, the earliest first, until the time is over."""
    cache = baseline.cache
    keys = cache.session.keys()
    limit = _TimeLimit(seconds)
    observed = cache.session.observe(baseline.state, [baseline.signal])
    scores, scored = _score(baseline, observed, keys, baseline.candidates, limit)
    known = torch.cat([scored, baseline.base])
    rows = len(baseline.base) + k
    count = rows - int(cache.protected.sum())
    free = known[~cache.protected[known]]
    selected = selectors.select_bursts(scores, free, cache.scores, count)
    spent = limit.spent()
    tokens = torch.cat([cache.protected.nonzero().flatten(), selected])
    result = ConditionResult(cache.with_active(tokens), rows)
    return TimedResult(result, len(scored) / len(baseline.candidates), spent)


def summary_in_time(baseline: BaselineState, k: int, seconds: float) -> TimedResult:
    """Chunks in the order of their summaries, each read whole, until the time is over."""
    cache = baseline.cache
    candidates = baseline.candidates
    keys = cache.session.keys()
    summaries = ChunkSummaries(keys, cache.context)
    limit = _TimeLimit(seconds)
    observed = cache.session.observe(baseline.state, [baseline.signal])
    chunk_numbers = candidates // selectors.CHUNK
    order = torch.cat([candidates[chunk_numbers == chunk] for chunk in summaries.rank(observed)])
    scores, scored = _score(baseline, observed, keys, order, limit)
    selected = selectors.select_bursts(scores, scored.sort().values, cache.scores, k)
    result = baseline.with_tokens(selected)
    return TimedResult(result, len(scored) / len(candidates), limit.spent())


def _score(
    baseline: BaselineState,
    observed: Observed,
    keys: Sequence[Tensor],
    order: Tensor,
    limit: _TimeLimit,
) -> tuple[Tensor, Tensor]:
    """Scores of the context, float32 `[context]`, and the tokens of `order` that were scored."""
    cache = baseline.cache
    active = torch.cat([baseline.base, cache.turn_tokens])
    scores, scored = selectors.scores_until(
        observed, keys, active, order, cache.sinks, limit.is_over
    )
    return scores[: cache.context], scored
