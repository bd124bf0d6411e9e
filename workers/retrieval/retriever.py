"""Retriever of one session: finds the rows that a step's queries attend to most in its host copy."""

import time
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvrecall.domain.settings.retrieval import Retrieval
from kvstore.index.summaries import FANOUT, KeySummaries
from workers.cache.slot_pool import EMPTY
from workers.native.searched_rows import SearchedRows
from workers.native.summaries import Summaries
from workers.parallel.alone import Alone
from workers.parallel.group import Group
from workers.positions.seen_rows import SeenRows
from workers.retrieval.descent import descend
from workers.retrieval.host_copy import HostCopy
from workers.retrieval.sampling import Ranks, draw, take_best
from workers.retrieval.weights import weigh, weigh_code_runs, weigh_codes, weigh_runs

LAYER_STEP = 37
"""Positions that the ranks of a layer are rotated from those of the one before."""

# And the ranks of a level of summaries from those of the level below.
_LEVEL_STEP = 151
# Nodes per head that are scored at once: of more a level above takes less time.
_MOST_NODES = 4096
# Rows that are drawn, by nodes that are: with 8 rows each, twice as many are scored at least.
_ROWS_PER_NODE = 4
_NO_CODES = torch.empty(0, dtype=torch.int64)


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


@dataclass(frozen=True, eq=False)
class _Candidates:
    """Rows that are scored, each once.

    Attributes:
        positions: int64 `[n_kv_heads, m]`; the rows' number or more where there is none.
        raised: What a row's logits are raised by, for rows that it stands for, float32
            `[n_kv_heads, m]`; -inf where there is none.
        keys: `[n_kv_heads, m, head_dim]`; any where there is none.
    """

    positions: Tensor
    raised: Tensor
    keys: Tensor


@dataclass(frozen=True)
class RetrievalCounts:
    """What the steps of a turn retrieved; rows are counted over all layers and KV heads."""

    steps: int = 0
    rows: int = 0
    seconds: float = 0.0


class Retriever:
    """Search of a session's rows by the queries of its own steps.

    Attributes:
        copy: The rows that can be found.
        count: Rows per KV head and layer that a step finds at most.
        ready: The session's steps retrieve now; set before a step, until the turn ends.
        evictions: The session's evictions that the copy has the rows of.
        counted: Of the turn so far, without the steps that a device has counted.
    """

    def __init__(
        self, copy: HostCopy, settings: Retrieval, count: int, group: Group = Alone()
    ) -> None:
        """Create a retriever over a session's rows; group: of the processes that have the other heads."""
        self.copy = copy
        self.count = count
        self.ready = False
        self.evictions = 0
        self.counted = RetrievalCounts()
        self._later: list[Tensor] = []
        self._settings = settings
        self._ranks = Ranks(group)

    def begin_turn(self) -> None:
        """Clear the turn's counts; no step retrieves before the copy has been filled again."""
        self.ready = False
        self.counted = RetrievalCounts()
        self._later = []

    @property
    def counts(self) -> RetrievalCounts:
        """Counts of the turn so far. Waits for a device that has some of them."""
        if self._later:
            later, self._later = self._later, []
            steps = self.counted.steps + len(later)
            rows = self.counted.rows + int(torch.stack(later).sum())
            self.counted = replace(self.counted, steps=steps, rows=rows)
        return self.counted

    def find(
        self,
        layer: int,
        queries: Tensor,
        active: Tensor,
        scale: float,
        seen: SeenRows | None = None,
    ) -> Found:
        """Find rows of a layer for queries, among those that are not active; see `search`.

        Keys are turned to where they are seen. Counts the rows and the time.
        """
        started = time.perf_counter()
        positions, bias = self._draw(layer, queries, active, scale, seen)
        keys, values = self.copy.gather(layer, positions)
        if seen is not None:
            keys = seen.turn(layer, keys, positions)
        found = Found(positions, keys, values, bias)
        self.count_found(layer, int((positions >= 0).sum()), time.perf_counter() - started)
        return found

    def searched_rows(self, layer: int) -> SearchedRows | None:
        """Rows of a layer as native code searches them; None where it does not: for the best, or by a tree."""
        described, first = self.copy.described_summaries, self.copy.summaries(0)
        rows = self.copy.rows
        ranks = self._ranks.unrotated(rows.length)
        if self.copy.is_coded:
            return SearchedRows(rows, layer, self.copy.codes.addresses, ranks, self.count)
        if described is None or first is None:
            return None
        top = first.lowest_level(_MOST_NODES)
        summaries = Summaries(described, top, self._most_nodes, _LEVEL_STEP)
        return SearchedRows(rows, layer, _NO_CODES, ranks, self.count, summaries)

    @property
    def _most_nodes(self) -> int:
        """Nodes of a level that a descent chooses at most."""
        return max(self._settings.nodes, self.count // _ROWS_PER_NODE)

    def _draw(
        self, layer: int, queries: Tensor, active: Tensor, scale: float, seen: SeenRows | None
    ) -> tuple[Tensor, Tensor]:
        """Search in native code, where there is some for the search; see `search`."""
        native, searched = self.copy.native, self.searched_rows(layer)
        if native is None or searched is None or searched.rows.layout.dtype not in native.dtypes:
            return self.search(layer, queries, active, scale, seen)
        if seen is not None:
            searched = searched.asked_by(queries, scale, seen)
        rotation = LAYER_STEP * layer
        return native.draw(queries, active, searched, rotation=rotation, scale=scale)

    def search(
        self,
        layer: int,
        queries: Tensor,
        active: Tensor,
        scale: float,
        seen: SeenRows | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Search the rows of a layer that a step retrieves, at most `count` in each head.

        A row's weight is that in the softmax over the rows that are scored, the mean over the query
        heads of its KV head. Where there are no more rows than `count`, all are taken; otherwise as
        `Retrieval.choice` says (see `workers.retrieval.sampling`). Of many rows those are scored that
        a descent through the summaries of the keys, or a DCI-tree, comes to.

        queries: `[n_kv_heads, group, head_dim]`; active: int32 positions `[n_kv_heads, n]`,
        `EMPTY` for none. Both are on the host. seen: of a session behind the model's window: its queries
        are turned to the keys of each segment, not the keys. Returns positions, int64 `[n_kv_heads, r]`, -1 for
        none, and their bias, see `Found`.
        """
        length = self.copy.rows.length
        # One place more: for positions behind the last row, and `EMPTY`, no candidates.
        excluded = active.long().clamp(max=length)
        # The newest row is that of the query's own token: in a batch, too, whose sessions are padded.
        newest = int(active.masked_fill(active == EMPTY, 0).max()) if active.numel() else 0
        rotation = newest + LAYER_STEP * layer
        ranks = self._ranks.rotated(len(queries), length + 1, rotation)
        queries = queries.float() * scale
        asked = queries if seen is None else seen.turn_queries(layer, queries)
        some = self._narrow(layer, asked, rotation, seen)
        if some is None:
            weights = pad(self._weigh(layer, asked, seen), (0, 1), value=-1.0)
            return self._select(weights.scatter_(1, excluded, -1.0), ranks, self.count)
        places = some.positions.clamp(max=length)
        marks = torch.zeros(len(queries), length + 1, dtype=torch.bool).scatter_(1, excluded, True)
        marks[:, -1] = True
        weights = weigh(queries, some.keys, some.raised).masked_fill_(marks.gather(1, places), -1.0)
        taken, bias = self._select(weights, ranks.gather(1, places), self.count)
        at = taken.clamp(min=0)
        bias += some.raised.gather(1, at)
        return places.gather(1, at).masked_fill(bias.isneginf(), -1), bias

    def _weigh(self, layer: int, asked: Tensor, seen: SeenRows | None) -> Tensor:
        """Weigh all rows of a layer; asked: as `_narrow`."""
        codes = self.copy.scored_codes(layer)
        if seen is None:
            keys = self.copy.keys
            return weigh(asked, keys(layer)) if codes is None else weigh_codes(asked, *codes)
        sizes = seen.split(0, self.copy.rows.length)
        if codes is None:
            return weigh_runs(asked, self.copy.keys(layer), sizes)
        return weigh_code_runs(asked, *codes, sizes)

    def _narrow(
        self, layer: int, asked: Tensor, rotation: int, seen: SeenRows | None
    ) -> _Candidates | None:
        """Narrow the rows of a layer down for queries that are scaled; None: every row.

        asked: the queries, with `seen` turned to each segment: `[segments, n_kv_heads, group, head_dim]`.
        """
        some = self._find_some(layer, asked, rotation, seen)
        if some is None or seen is None:
            return some
        return replace(some, keys=seen.turn(layer, some.keys, some.positions))

    def _find_some(
        self, layer: int, asked: Tensor, rotation: int, seen: SeenRows | None
    ) -> _Candidates | None:
        """Find candidates by the layer's index; their keys are as they were computed."""
        summaries = self.copy.summaries(layer)
        level = 0 if summaries is None else summaries.lowest_level(_MOST_NODES)
        if summaries is not None and level:
            return self._descend(layer, summaries, level, asked, rotation, seen)
        queries = asked if seen is None else asked.transpose(0, 1).flatten(1, 2)
        positions = self.copy.candidates(layer, queries)
        if positions is None:
            return None
        none = positions < 0
        raised = torch.zeros(positions.shape).masked_fill_(none, -torch.inf)
        keys = self.copy.gather_keys(layer, positions)
        return _Candidates(positions.masked_fill(none, self.copy.rows.length), raised, keys)

    def _descend(
        self,
        layer: int,
        summaries: KeySummaries,
        level: int,
        asked: Tensor,
        rotation: int,
        seen: SeenRows | None,
    ) -> _Candidates:
        """Descend from a level of the summaries of a layer to some of its rows."""

        def choose(weights: Tensor, nodes: Tensor | None, at: int) -> tuple[Tensor, Tensor]:
            # The last run's missing nodes have numbers, too.
            numbers = summaries.count(at) + FANOUT
            ranks = self._ranks.rotated(len(weights), numbers, rotation + _LEVEL_STEP * at)
            ranks = ranks[:, : weights.shape[1]] if nodes is None else ranks.gather(1, nodes)
            return self._select(weights, ranks, self._most_nodes)

        runs = descend(summaries, asked, level, choose, seen)
        gather = partial(self.copy.gather_key_runs, layer)
        return _Candidates(*runs.nodes(), runs.gather(gather))

    def _select(self, weights: Tensor, ranks: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Select at most `count` indices of weights `[n_kv_heads, n]`, negative for no candidate."""
        if weights.shape[1] <= count or self._settings.choice == "best":
            return take_best(weights, count)
        return draw(weights, ranks, count)

    def count_found(self, layer: int, rows: int, seconds: float) -> None:
        """Count the rows that were found in a layer, and the time that it took."""
        counts = self.counted
        steps = counts.steps + (layer == 0)
        self.counted = RetrievalCounts(steps, counts.rows + rows, counts.seconds + seconds)

    def count_later(self, rows: Tensor) -> None:
        """Count the rows that a step has found in all layers, int64 `[]`, on a device that has yet to find them."""
        self._later.append(rows)
