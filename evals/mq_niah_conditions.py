"""Conditions of MQ-NIAH: what is active when the second turn is asked (RepairKV 3.4, 4.4)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from evals import selectors
from evals.harness import Message
from evals.mq_niah_case import Case
from evals.mq_niah_examples import question_of
from evals.replayed import Operator, rows_held
from evals.selectors import Summaries
from kvrecall.v1 import worker_pb2 as wire

PUBLISHED = Operator('{"select": "bursts"}')
OURS = Operator('{"select": "spread"}')
OURS_PER_HEAD = Operator('{"select": "spread", "per_head": true}')
OURS_SWAP = Operator('{"select": "spread", "swap": true}', swap=True)
_VISITED_SHARE = 8


@dataclass(frozen=True)
class Held:
    """What a condition made active. `budget`: rows of the context that it may hold. `report`: the worker's repair."""

    state: wire.SessionState
    budget: int
    report: wire.RepairReport | None = None


@dataclass(frozen=True)
class Before:
    """A case before its second turn: the base cache, what is evicted from it, and what the signal looks at."""

    case: Case
    base: Tensor
    candidates: Tensor
    signal: Message
    stale: Message
    seed: str
    """Of Random-K, the same for all that differs in K alone."""

    @property
    def state(self) -> wire.SessionState:
        """The base cache."""
        return self.case.holding(self.base)

    def with_tokens(self, tokens: Tensor) -> Held:
        """The base and these tokens beside it."""
        return Held(self.case.holding(torch.cat([self.base, tokens])), len(self.base) + len(tokens))

    def repaired(self, k: int, operator: Operator, signal: Message) -> Held:
        """The worker's own repair."""
        result = self.case.replayed.repaired(self.state, k, operator, [signal])
        budget = len(self.base) + (0 if operator.swap else k)
        return Held(result.state, budget, result.report)

    def signal_scores(self, rows: Tensor) -> Tensor:
        """What the signal gives each of some tokens of the context, their softmax over these and what is active."""
        replayed = self.case.replayed
        observed = replayed.observed(self.state, [self.signal])
        every = torch.unique(torch.cat([rows, self.base, self.case.after]))
        return selectors.signal_scores(observed, replayed.keys(), every, self.case.sinks)[: self.case.context]


def before(case: Case) -> Before:
    """The base cache of a case's first turn, with the second turn's signal."""
    base = case.compressed(case.base_rows)
    evicted = torch.ones(case.context, dtype=torch.bool)
    evicted[base] = False
    numbers = "".join(needle.name for needle in case.second)
    return Before(
        case, base, evicted.nonzero().flatten(), question_of(case.second), question_of(case.first), f"random:{numbers}"
    )


def _full(ready: Before, k: int) -> Held:
    return Held(ready.case.holding(torch.arange(ready.case.context)), ready.case.context)


def _base(ready: Before, k: int) -> Held:
    return Held(ready.state, len(ready.base))


def _matched(ready: Before, k: int) -> Held:
    rows = ready.case.base_rows + k
    return Held(ready.case.holding(ready.case.compressed(rows)), rows)


def _random(ready: Before, k: int) -> Held:
    return ready.with_tokens(selectors.evenly_random(ready.candidates, k, f"{ready.seed}:{k}"))


def _oldest(ready: Before, k: int) -> Held:
    return ready.with_tokens(selectors.oldest(ready.candidates, k))


def _stale(ready: Before, k: int) -> Held:
    return ready.repaired(k, PUBLISHED, ready.stale)


def _wrong(ready: Before, k: int) -> Held:
    return ready.repaired(k, PUBLISHED, ready.case.donor)


def _page_summary(ready: Before, k: int) -> Held:
    """Chunks ranked by their summaries; of the best with an eighth of the candidates, or twice K, every key is read."""
    case = ready.case
    ranked = Summaries(case.replayed.keys(), case.context).ranked(case.replayed.observed(ready.state, [ready.signal]))
    seen = selectors.visited(ranked, ready.candidates, max(2 * k, len(ready.candidates) // _VISITED_SHARE))
    return ready.with_tokens(selectors.best_bursts(ready.signal_scores(seen), seen, case.scores, k))


def _refresh(ready: Before, k: int) -> Held:
    """All rows of the context are chosen anew: bursts over active and evicted rows alike, sinks and the newest stay."""
    case, rows = ready.case, ready.case.base_rows + k
    free = (~case.kept).nonzero().flatten()
    scores = ready.signal_scores(torch.arange(case.context))
    chosen = selectors.best_bursts(scores, free, case.scores, rows - int(case.kept.sum()))
    return Held(case.holding(torch.cat([case.kept.nonzero().flatten(), chosen])), rows)


def _published(ready: Before, k: int) -> Held:
    return ready.repaired(k, PUBLISHED, ready.signal)


def _ours(ready: Before, k: int) -> Held:
    return ready.repaired(k, OURS, ready.signal)


def _ours_per_head(ready: Before, k: int) -> Held:
    return ready.repaired(k, OURS_PER_HEAD, ready.signal)


def _ours_swap(ready: Before, k: int) -> Held:
    return ready.repaired(k, OURS_SWAP, ready.signal)


FULL, BASE, MATCHED = "full cache", "base", "matched no-repair"
RANDOM, OLDEST, STALE, WRONG = "Random-K", "Oldest-K", "StaleQ-K", "WrongQ-K"
SUMMARY, REFRESH, REPAIR = "page summary", "Refresh", "RepairKV"
SPREAD, PER_HEAD, SWAP = "ours", "ours, per head", "ours, swap"

CONDITIONS: Mapping[str, Callable[[Before, int], Held]] = MappingProxyType(
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
        SPREAD: _ours,
        PER_HEAD: _ours_per_head,
        SWAP: _ours_swap,
    }
)
WITHOUT_K = (FULL, BASE)
"""Conditions that are the same at every K."""


def rows_fit(held: Held, case: Case) -> int:
    """Active rows per head, all of them: of the context within the budget, and the first turn's.

    Asserts it: a condition with more rows than it says would be no comparison.
    """
    rows, after = rows_held(held.state), len(case.after)
    assert rows <= held.budget + after, f"{rows} rows are active, {held.budget} and {after} may be"
    return rows
