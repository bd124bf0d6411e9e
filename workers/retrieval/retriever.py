"""Retriever of one session: finds the rows that a step's queries attend to most in its arena."""

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.retrieval.indexed_rows import IndexedRows
from workers.retrieval.sampling import Ranks, draw, take_best
from workers.retrieval.settings import Retrieval

# Positions that the ranks of a layer are rotated from those of the one before.
_LAYER_STEP = 37


@dataclass(frozen=True, eq=False)
class Found:
    """Rows that were found in one layer, on the host.

    Attributes:
        positions: int64 `[n_kv_heads, r]`, -1 for none.
        keys: `[n_kv_heads, r, head_dim]`; any row where there is none.
        values: As `keys`.
        bias: What is added to the rows' logits, float32 `[n_kv_heads, r]`: 0 for a row that stands
            for itself alone, more for one that stands for others too, -inf where there is none.
    """

    positions: Tensor
    keys: Tensor
    values: Tensor
    bias: Tensor

    @property
    def biased(self) -> bool:
        """True if a logit is changed."""
        return bool((self.bias != 0).any())


@dataclass(frozen=True)
class RetrievalCounts:
    """What the steps of a turn retrieved; rows are counted over all layers and KV heads."""

    steps: int = 0
    rows: int = 0
    seconds: float = 0.0


class Retriever:
    """Search of a session's rows by the queries of its own steps.

    Attributes:
        rows: The rows that can be found.
        count: Rows per KV head and layer that a step finds at most.
        ready: The session's steps retrieve now; set before a step, until the turn ends.
        evictions: The session's evictions that the arena has the rows of.
        counts: Of the turn so far.
    """

    def __init__(self, rows: IndexedRows, settings: Retrieval, count: int) -> None:
        """Create a retriever over a session's rows."""
        self.rows = rows
        self.count = count
        self.ready = False
        self.evictions = 0
        self.counts = RetrievalCounts()
        self._settings = settings
        self._ranks = Ranks()

    def begin_turn(self) -> None:
        """Clear the turn's counts; no step retrieves before the arena has been filled again."""
        self.ready = False
        self.counts = RetrievalCounts()

    def find(self, layer: int, queries: Tensor, active: Tensor, scale: float) -> Found:
        """Find rows of a layer for queries, among those that are not active; see `search`.

        Counts the rows and the time.
        """
        started = time.perf_counter()
        positions, bias = self.search(layer, queries, active, scale)
        found = Found(positions, *self.rows.arena.gather(layer, positions), bias)
        self._count(layer, positions, time.perf_counter() - started)
        return found

    def search(
        self, layer: int, queries: Tensor, active: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Search the rows of a layer that a step retrieves, at most `count` in each head.

        A row's weight is that in the softmax over the rows that are scored, the mean over the query
        heads of its KV head. Where there are no more rows than `count`, all are taken; otherwise as
        `Retrieval.choice` says (see `workers.retrieval.sampling`).

        queries: `[n_kv_heads, group, head_dim]`; active: int32 positions `[n_kv_heads, n]`,
        `EMPTY` for none. Both are on the host. Returns positions, int64 `[n_kv_heads, r]`, -1 for
        none, and their bias, see `Found`.
        """
        keys = self.rows.arena.keys(layer)
        length = keys.shape[1]
        # One column more: for positions behind the arena's end, and `EMPTY`, no candidates.
        excluded = active.long().clamp(max=length)
        candidates = self.rows.candidates(layer, queries)
        # The newest row is that of the query's own token.
        newest = int(active.max()) if active.numel() else 0
        ranks = self._ranks.rotated(len(keys), length + 1, newest + _LAYER_STEP * layer)
        if candidates is None:
            weights = torch.full((len(keys), length + 1), -1.0)
            torch.mean(_weigh(queries, keys, scale), 1, out=weights[:, :-1])
            return self._select(weights.scatter_(1, excluded, -1.0), ranks)
        marks = torch.zeros(len(keys), length + 1, dtype=torch.bool).scatter_(1, excluded, True)
        places = candidates.clamp(min=0)
        marks = marks.gather(1, places) | (candidates < 0)
        some = self.rows.arena.gather_keys(layer, candidates)
        weights = _weigh(queries, some, scale).mean(1).masked_fill_(marks, -1.0)
        taken, bias = self._select(weights, ranks.gather(1, places))
        return candidates.gather(1, taken.clamp(min=0)).masked_fill(taken < 0, -1), bias

    def _select(self, weights: Tensor, ranks: Tensor) -> tuple[Tensor, Tensor]:
        """Select at most `count` indices of weights `[n_kv_heads, n]`, negative for no candidate."""
        few = int((weights >= 0).sum(1).max()) <= self.count
        if few or self._settings.choice == "best":
            return take_best(weights, self.count)
        return draw(weights, ranks, self.count)

    def _count(self, layer: int, positions: Tensor, seconds: float) -> None:
        counts = self.counts
        self.counts = RetrievalCounts(
            counts.steps + (layer == 0),
            counts.rows + int((positions >= 0).sum()),
            counts.seconds + seconds,
        )


def _weigh(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Attention weights, float32 `[n_kv_heads, group, n]`."""
    queries = (queries * scale).to(keys.dtype)
    if keys.dtype == torch.float32:
        # For few queries torch reads keys at memory's speed if they come first.
        logits = (keys @ queries.mT).mT
    else:
        # In one product of all heads torch copies keys of 16 bits, which takes longer than it.
        logits = torch.stack([each @ rows.mT for each, rows in zip(queries, keys, strict=True)])
    return logits.float().softmax(-1)
