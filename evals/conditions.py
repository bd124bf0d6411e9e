"""Conditions: what is active when the second turn is asked, all at the same number of rows (RepairKV 3.4, 4.4)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from evals import selectors
from evals.compressed import Compressed
from evals.harness import Message
from evals.replay_session import Operator
from evals.selectors import Summaries
from kvrecall.protocol.v1 import worker_pb2 as wire

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
    """The base cache before a turn, what is evicted from it, and the signals.

    `signal` is what becomes known of the turn, `stale` of the turn before, `donor` of another example's. `seed`: of
    Random-K.
    """

    cache: Compressed
    base: Tensor
    candidates: Tensor
    signal: Message
    stale: Message
    donor: Message
    seed: str

    @property
    def state(self) -> wire.SessionState:
        """The base cache."""
        return self.cache.holding(self.base)

    def with_tokens(self, tokens: Tensor) -> Held:
        """The base and these tokens beside it."""
        return Held(
            self.cache.holding(torch.cat([self.base, tokens])), len(self.base) + len(tokens)
        )

    def repaired(self, k: int, operator: Operator, signal: Message) -> Held:
        """The worker's own repair."""
        result = self.cache.replayed.repaired(self.state, k, operator, [signal])
        budget = len(self.base) + (0 if operator.swap else k)
        return Held(result.state, budget, result.report)

    def signal_scores(self, rows: Tensor) -> Tensor:
        """What the signal gives each of some tokens of the context, their softmax over these and what is active."""
        replayed = self.cache.replayed
        observed = replayed.observed(self.state, [self.signal])
        every = torch.unique(torch.cat([rows, self.base, self.cache.after]))
        return selectors.signal_scores(observed, replayed.keys(), every, self.cache.sinks)[
            : self.cache.context
        ]


def before(cache: Compressed, signal: Message, stale: Message, donor: Message, seed: str) -> Before:
    """The base cache as the first stage keeps it."""
    base = cache.compressed(cache.base_rows)
    evicted = torch.ones(cache.context, dtype=torch.bool)
    evicted[base] = False
    return Before(cache, base, evicted.nonzero().flatten(), signal, stale, donor, seed)


def _full(ready: Before, k: int) -> Held:
    return Held(ready.cache.holding(torch.arange(ready.cache.context)), ready.cache.context)


def _base(ready: Before, k: int) -> Held:
    return Held(ready.state, len(ready.base))


def _matched(ready: Before, k: int) -> Held:
    rows = ready.cache.base_rows + k
    return Held(ready.cache.holding(ready.cache.compressed(rows)), rows)


def _random(ready: Before, k: int) -> Held:
    return ready.with_tokens(selectors.evenly_random(ready.candidates, k, f"{ready.seed}:{k}"))


def _oldest(ready: Before, k: int) -> Held:
    return ready.with_tokens(selectors.oldest(ready.candidates, k))


def _stale(ready: Before, k: int) -> Held:
    return ready.repaired(k, PUBLISHED, ready.stale)


def _wrong(ready: Before, k: int) -> Held:
    return ready.repaired(k, PUBLISHED, ready.donor)


def _page_summary(ready: Before, k: int) -> Held:
    """Chunks ranked by their summaries; of the best with an eighth of the candidates, or twice K, every key is read."""
    cache = ready.cache
    ranked = Summaries(cache.replayed.keys(), cache.context).ranked(
        cache.replayed.observed(ready.state, [ready.signal])
    )
    seen = selectors.visited(
        ranked, ready.candidates, max(2 * k, len(ready.candidates) // _VISITED_SHARE)
    )
    return ready.with_tokens(
        selectors.best_bursts(ready.signal_scores(seen), seen, cache.scores, k)
    )


def _refresh(ready: Before, k: int) -> Held:
    """All rows of the context are chosen anew: bursts over active and evicted rows alike, sinks and the newest stay."""
    cache = ready.cache
    rows = ready.cache.base_rows + k
    free = (~cache.kept).nonzero().flatten()
    scores = ready.signal_scores(torch.arange(cache.context))
    chosen = selectors.best_bursts(scores, free, cache.scores, rows - int(cache.kept.sum()))
    return Held(cache.holding(torch.cat([cache.kept.nonzero().flatten(), chosen])), rows)


def _published(ready: Before, k: int) -> Held:
    return ready.repaired(k, PUBLISHED, ready.signal)


def _ours(ready: Before, k: int) -> Held:
    return ready.repaired(k, OURS, ready.signal)


def _ours_per_head(ready: Before, k: int) -> Held:
    return ready.repaired(k, OURS_PER_HEAD, ready.signal)


def _ours_swap(ready: Before, k: int) -> Held:
    return ready.repaired(k, OURS_SWAP, ready.signal)


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
SPREAD = "ours"
PER_HEAD = "ours, per head"
SWAP = "ours, swap"

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
