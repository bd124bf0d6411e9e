"""Conditions: the rows that are active when the second turn is asked (RepairKV 3.4, 4.4)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from evals import selectors
from evals.compressed import CompressedContext
from evals.harness import Message
from evals.replay_session import Operator
from evals.selectors import ChunkSummaries
from kvrecall.protocol.v1 import worker_pb2 as pb

PUBLISHED = Operator('{"select": "bursts", "contrast": 0}')
PUBLISHED_CONTRAST = Operator('{"select": "bursts"}')
# The selection as it was before there was a contrast.
SPREAD_REPAIR_PLAIN = Operator(
    '{"select": "spread", "contrast": 0, "fade_before": 0.6, "fade_after": 0.9}'
)
SPREAD_REPAIR = Operator('{"select": "spread"}')
SPREAD_REPAIR_SWAP = Operator('{"select": "spread", "swap": true}', swap=True)
# The page summary reads the keys of this part of the candidates: an eighth.
_READ_DIVISOR = 8


@dataclass(frozen=True)
class ConditionResult:
    """The session state of a condition.

    `budget` bounds the active rows of the context; `report` is that of the worker's repair.
    """

    state: pb.SessionState
    budget: int
    report: pb.RepairReport | None = None

    @property
    def repair_seconds(self) -> float:
        """Seconds of the worker's repair; 0 for a condition without one."""
        return self.report.seconds if self.report else 0.0


@dataclass(frozen=True)
class BaselineState:
    """The base cache before a turn, the tokens evicted from it, and the repair signals.

    `base` and `candidates` are int64 positions of the context's active and evicted tokens. `signal`
    is the text known of the turn, `stale` that of the turn before, `donor` that of another example.
    `seed` is the seed of Random-K.
    """

    cache: CompressedContext
    base: Tensor
    candidates: Tensor
    signal: Message
    stale: Message
    donor: Message
    seed: str

    @property
    def state(self) -> pb.SessionState:
        """State with the base cache active."""
        return self.cache.with_active(self.base)

    def with_tokens(self, tokens: Tensor) -> ConditionResult:
        """Base cache plus the tokens at these int64 positions."""
        state = self.cache.with_active(torch.cat([self.base, tokens]))
        return ConditionResult(state, len(self.base) + len(tokens))

    def repair(self, k: int, operator: Operator, signal: Message) -> ConditionResult:
        """Base cache after the worker's own repair by `k` tokens on `signal`."""
        result = self.cache.session.repair(self.state, k, operator, [signal])
        budget = len(self.base) + (0 if operator.swap else k)
        return ConditionResult(result.state, budget, result.report)

    def signal_scores(self, tokens: Tensor) -> Tensor:
        """Attention of the signal to context tokens, float32 `[context]`.

        The softmax runs over `tokens` (int64 positions) and the active rows; other scores are 0.
        """
        session = self.cache.session
        observed = session.observe(self.state, [self.signal])
        visible = torch.unique(torch.cat([tokens, self.base, self.cache.turn_tokens]))
        scores = selectors.signal_scores(observed, session.keys(), visible, self.cache.sinks)
        return scores[: self.cache.context]


def build_baseline(
    cache: CompressedContext, signal: Message, stale: Message, donor: Message, seed: str
) -> BaselineState:
    """The base cache that the first stage keeps, with the repair signals."""
    base = cache.select(cache.base_rows)
    evicted = torch.ones(cache.context, dtype=torch.bool)
    evicted[base] = False
    return BaselineState(cache, base, evicted.nonzero().flatten(), signal, stale, donor, seed)


def _full(baseline: BaselineState, k: int) -> ConditionResult:
    cache = baseline.cache
    return ConditionResult(cache.with_active(torch.arange(cache.context)), cache.context)


def _base(baseline: BaselineState, k: int) -> ConditionResult:
    return ConditionResult(baseline.state, len(baseline.base))


def _matched(baseline: BaselineState, k: int) -> ConditionResult:
    cache = baseline.cache
    rows = cache.base_rows + k
    return ConditionResult(cache.with_active(cache.select(rows)), rows)


def _random(baseline: BaselineState, k: int) -> ConditionResult:
    tokens = selectors.random_tokens(baseline.candidates, k, f"{baseline.seed}:{k}")
    return baseline.with_tokens(tokens)


def _oldest(baseline: BaselineState, k: int) -> ConditionResult:
    return baseline.with_tokens(selectors.oldest_tokens(baseline.candidates, k))


def _stale(baseline: BaselineState, k: int) -> ConditionResult:
    return baseline.repair(k, PUBLISHED, baseline.stale)


def _wrong(baseline: BaselineState, k: int) -> ConditionResult:
    return baseline.repair(k, PUBLISHED, baseline.donor)


def _page_summary(baseline: BaselineState, k: int) -> ConditionResult:
    """Bursts among the best chunks by their summaries.

    Keys are read of the best chunks until they hold an eighth of the candidates, or 2 K.
    """
    session = baseline.cache.session
    candidates = baseline.candidates
    summaries = ChunkSummaries(session.keys(), baseline.cache.context)
    ranked = summaries.rank(session.observe(baseline.state, [baseline.signal]))
    least = max(2 * k, len(candidates) // _READ_DIVISOR)
    read = selectors.tokens_of_first_chunks(ranked, candidates, least)
    scores = baseline.signal_scores(read)
    return baseline.with_tokens(selectors.select_bursts(scores, read, baseline.cache.scores, k))


def _refresh(baseline: BaselineState, k: int) -> ConditionResult:
    """All rows of the context selected anew: bursts over active and evicted rows alike.

    Sinks and the newest tokens stay.
    """
    cache = baseline.cache
    rows = cache.base_rows + k
    free = (~cache.protected).nonzero().flatten()
    scores = baseline.signal_scores(torch.arange(cache.context))
    count = rows - int(cache.protected.sum())
    selected = selectors.select_bursts(scores, free, cache.scores, count)
    tokens = torch.cat([cache.protected.nonzero().flatten(), selected])
    return ConditionResult(cache.with_active(tokens), rows)


def _published(baseline: BaselineState, k: int) -> ConditionResult:
    return baseline.repair(k, PUBLISHED, baseline.signal)


def _spread(baseline: BaselineState, k: int) -> ConditionResult:
    return baseline.repair(k, SPREAD_REPAIR, baseline.signal)


def _published_contrast(baseline: BaselineState, k: int) -> ConditionResult:
    return baseline.repair(k, PUBLISHED_CONTRAST, baseline.signal)


def _spread_plain(baseline: BaselineState, k: int) -> ConditionResult:
    return baseline.repair(k, SPREAD_REPAIR_PLAIN, baseline.signal)


def _spread_swap(baseline: BaselineState, k: int) -> ConditionResult:
    return baseline.repair(k, SPREAD_REPAIR_SWAP, baseline.signal)


FULL = "full cache"
BASE = "base"
MATCHED = "matched no-repair"
RANDOM = "Random-K"
OLDEST = "Oldest-K"
STALE = "StaleQ-K"
WRONG = "WrongQ-K"
SUMMARY = "page summary"
REFRESH = "Refresh"
REPAIR = "RepairKV"
REPAIR_CONTRAST = "RepairKV, contrast"
SPREAD = "spread"
PLAIN = "spread, no contrast"
SWAP = "spread, swap"

CONDITIONS: Mapping[str, Callable[[BaselineState, int], ConditionResult]] = MappingProxyType(
    {
        FULL: _full,
        BASE: _base,
        MATCHED: _matched,
        RANDOM: _random,
        OLDEST: _oldest,
        STALE: _stale,
        WRONG: _wrong,
        SUMMARY: _page_summary,
        REFRESH: _refresh,
        REPAIR: _published,
        REPAIR_CONTRAST: _published_contrast,
        SPREAD: _spread,
        PLAIN: _spread_plain,
        SWAP: _spread_swap,
    }
)
# Conditions that are the same at every K.
WITHOUT_K = (FULL, BASE)
