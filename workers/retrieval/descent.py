"""Descent through the summaries of a layer's keys, to runs of rows that stand for all of them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvstore.index.summaries import FANOUT, KeySummaries
from workers.positions.seen_rows import SeenRows
from workers.retrieval.weights import weigh, weigh_kinds

Choose = Callable[[Tensor, Tensor | None, int], tuple[Tensor, Tensor]]
"""Choice among the nodes of a level: of their weights, float32 `[n_kv_heads, m]`, their numbers, int64
of the same shape, None for all in their order, and the level. Returns indices and their bias, as
`workers.retrieval.sampling.draw`.
"""


@dataclass(frozen=True, eq=False)
class Runs:
    """Runs of 8 consecutive nodes of a level, or of rows.

    Attributes:
        numbers: int64 `[n_kv_heads, m]`, each once; any where there is none. Run i begins with node
            `8 * i`.
        raised: What the logits of a run's nodes are raised by, for other runs that it stands for,
            float32 `[n_kv_heads, m]`; -inf for a run that is none.
        missing: Nodes that the last run lacks.
    """

    numbers: Tensor
    raised: Tensor
    missing: int

    def nodes(self) -> tuple[Tensor, Tensor]:
        """Numbers of the nodes, or positions of the rows, and what each one's logits are raised by.

        int64 and float32 `[n_kv_heads, 8 * m]`; -inf for nodes that are missing, whose numbers are
        those behind the last one.
        """
        nodes = self.numbers[..., None] * FANOUT + torch.arange(FANOUT)
        raised = self.raised[..., None].expand(nodes.shape).flatten(1)
        if self.missing:
            raised[:, -self.missing :] = -torch.inf
        return nodes.flatten(1), raised

    def gather(self, from_runs: Callable[[Tensor], Tensor]) -> Tensor:
        """Gather the nodes' keys, `[n_kv_heads, 8 * m, d]`, 0 for those that are missing.

        from_runs: gathers the keys of runs by their numbers.
        """
        keys = from_runs(self.numbers)
        if self.missing:
            keys[:, -self.missing :] = 0  # memory that was never written may hold NaN
        return keys


def descend(
    summaries: KeySummaries,
    queries: Tensor,
    level: int,
    choose: Choose,
    seen: SeenRows | None = None,
) -> Runs:
    """Choose nodes of a level by the attention that their keys may get, then of those below them.

    A node's weight is its share of the softmax if its keys were normally distributed: the mean of
    `exp(q k)` is then `exp(q mean + q^2 variance / 2)`. Nodes that are chosen are raised, so that they
    stand for those that are not. So the rows of the runs stand for all rows, whatever keys they have:
    the worse means and variances describe them, the more the sums vary from step to step.

    queries: float32 `[n_kv_heads, group, d]`, scaled; level: 1 or more. With `seen` they are
    `[segments, n_kv_heads, group, d]`, as `SeenRows.turn_queries` returns them; a node whose rows are of two
    segments counts to that of its first. Returns runs of rows.
    """
    asked = torch.cat([queries, queries.square() / 2], -1)

    def weigh_nodes(keys: Tensor, nodes: Tensor, at: int, raised: Tensor | None = None) -> Tensor:
        if seen is None:
            return weigh(asked, keys, raised)
        return weigh_kinds(asked, keys, seen.find_segments(nodes * FANOUT**at), raised)

    top = summaries.nodes(level)
    numbers, bias = choose(weigh_nodes(top, torch.arange(top.shape[1]), level), None, level)
    runs = _below(summaries, level, numbers, bias)
    for lower in reversed(range(1, level)):
        nodes, raised = runs.nodes()
        keys = runs.gather(partial(summaries.nodes, lower))
        indices, bias = choose(weigh_nodes(keys, nodes, lower, raised), nodes, lower)
        at = indices.clamp(min=0)
        runs = _below(summaries, lower, nodes.gather(1, at), bias + raised.gather(1, at))
    return runs


def _below(summaries: KeySummaries, level: int, numbers: Tensor, bias: Tensor) -> Runs:
    """The runs below chosen nodes, and the last one, whose node is not there yet."""
    # Those that are none, or missing, are raised by -inf.
    numbers = numbers.clamp(0, summaries.count(level) - 1)
    missing = -summaries.count(level - 1) % FANOUT
    if missing:
        numbers = pad(numbers, (0, 1), value=summaries.count(level))
        bias = pad(bias, (0, 1))
    return Runs(numbers, bias, missing)
