"""DCI-tree over a layer's keys (IceCache, section 3.3): nodes of similar keys, searched top-down.

Flat tensors with a leading axis of KV heads, for CPU and GPU. The rows are divided by their positions
into segments (`DciSettings.segments`); each has a small tree of its own, and a search descends all
of them as one. So an insertion never changes a node: it appends a segment, or puts a larger one in
place of the smaller ones at the end. What is found does not depend on the pieces in which rows were
added, nor on rows that were forgotten.
"""

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvstore.errors import RowRangeError
from kvstore.format.page import PageLayout
from kvstore.index.dci.levels import Level, Nodes, build_levels, level_bytes, node_ends
from kvstore.index.dci.settings import DciSettings

# Weight of the standard deviation of a node's logits beside their mean.
_DEVIATIONS = 1.5
# Nodes of a level that are all compared to the query; only above that a search begins higher up.
_FLAT = 2048
# Rows under the nodes that are kept at an upper level, by rows that the search returns.
_BEAM = 2.0
# Nodes of a query's ranking, by those that a search returns if nodes have their mean size.
_RANKED = 1.25


class DciTree:
    """A `KeyIndex` that returns the rows of the nodes that a group's queries rank highest.

    The last rows, fewer than 256, are in no node yet and always candidates.
    """

    def __init__(self, settings: DciSettings) -> None:
        self._settings = settings
        self._rows = 0
        self._heads = 0
        self._sizes: list[int] = []
        self._levels = [Level() for _ in settings.promotion]

    @property
    def rows(self) -> int:
        """Rows per KV head that are indexed."""
        return self._rows

    @property
    def nbytes(self) -> int:
        """Bytes of memory, with what is reserved."""
        return sum(level.nbytes for level in self._levels)

    @staticmethod
    def bytes_for(layout: PageLayout, settings: DciSettings, rows: int) -> int:
        """Most bytes of the index of one layer with so many rows per KV head."""
        node_bytes = layout.head_dim * layout.dtype.itemsize
        if settings.rank != "parent":
            node_bytes *= 2
        counts = (rows, *settings.most_nodes(rows))
        return layout.n_kv_heads * sum(
            level_bytes(nodes, members, node_bytes) for members, nodes in pairwise(counts)
        )

    def extend(self, keys: Tensor) -> None:
        """Index the rows from position `rows` on; keys: all of the layer, `[n_kv_heads, n, d]`.

        Raises RowRangeError when there are fewer keys than rows, or another number of heads.
        """
        heads, n, _ = keys.shape
        if n < self._rows or self._heads not in (0, heads):
            raise RowRangeError(
                f"keys of {heads} heads and {n} rows were given to an index of {self._heads} heads "
                f"and {self._rows} rows; give all keys of the layer"
            )
        self._heads = heads
        self._rows = n
        sizes = list(self._settings.segments(n))
        if sizes == self._sizes:
            return
        self._keep_common(sizes)
        first = sum(self._sizes)
        for size in sizes[len(self._sizes) :]:
            built = build_levels(keys[:, first : first + size], self._settings)
            for level, nodes in zip(self._levels, built, strict=True):
                level.append(nodes)
            first += size
        self._sizes = sizes

    def candidates(self, queries: Tensor) -> Tensor:
        """Find the rows of the best nodes; queries: float32 `[n_kv_heads, q, head_dim]`, q >= 1.

        Nodes are taken in turns, the best of each query, then the second best of each: no query
        takes the whole budget. Returns positions, int64 `[n_kv_heads, m]`, each once, -1 for none.
        m is a little less than `DciSettings.budget`, and more only where the best nodes are larger.
        """
        covered = sum(self._sizes)
        budget = self._settings.budget(self._rows)
        if budget == self._rows or not covered:
            every = torch.arange(self._rows, device=queries.device)
            return every.expand(len(queries), -1)
        tail = torch.arange(covered, self._rows, device=queries.device)
        chosen: Tensor | None = None
        for level in reversed(range(self._first_level() + 1)):
            wanted = budget - len(tail) if level == 0 else int(_BEAM * budget)
            chosen = descend(self._levels[level].nodes, queries, chosen, wanted)
        assert chosen is not None, "a tree has a level"
        return torch.cat([chosen, tail.expand(len(chosen), -1)], dim=1)

    def truncate(self, rows: int) -> None:
        """Forget the rows from position `rows` on.

        Rows of a segment that loses some are in no node, and always candidates, until `extend`.
        """
        self._rows = min(self._rows, max(0, rows))
        self._keep_common(list(self._settings.segments(self._rows)))

    def check(self) -> None:
        """Raise AssertionError unless every row is indexed exactly once in every head."""
        below = sum(self._sizes)
        assert below <= self._rows, f"segments have {below} rows of {self._rows}"
        if not below:
            return
        expected = torch.ones(self._heads, below, dtype=torch.int32)
        for number, level in enumerate(self._levels):
            nodes = level.nodes
            every = torch.arange(below).expand(self._heads, -1)
            found = nodes.members.cpu().long().sort(dim=1).values
            assert torch.equal(found, every), f"level {number} has not every member once"
            ends = nodes.sizes.cumsum(1)
            assert torch.equal(ends - nodes.sizes, nodes.starts), f"level {number}: gaps in members"
            assert (ends[:, -1] == below).all(), f"level {number}: members outside of its nodes"
            rows = expected.gather(1, nodes.members.cpu().long()).cumsum(1)
            rows = torch.nn.functional.pad(rows, (1, 0)).gather(1, ends.cpu())
            counted = nodes.rows.cpu().cumsum(1)
            assert torch.equal(rows, counted), f"level {number}: nodes count other rows than theirs"
            expected, below = nodes.rows.cpu(), level.count

    def _keep_common(self, sizes: list[int]) -> None:
        """Keep the first segments that are the same in `sizes`."""
        common = 0
        for mine, other in zip(self._sizes, sizes, strict=False):
            if mine != other:
                break
            common += 1
        self._sizes = self._sizes[:common]
        ends = node_ends(self._sizes, self._settings)
        for level, members, nodes in zip(self._levels, ends[:-1], ends[1:], strict=True):
            level.cut(nodes, members)

    def _first_level(self) -> int:
        """The level at which a search begins."""
        for number, level in enumerate(self._levels):
            if level.count <= _FLAT:
                return number
        return len(self._levels) - 1


def descend(nodes: Nodes, queries: Tensor, among: Tensor | None, wanted: int) -> Tensor:
    """Choose the best nodes of a level, with about `wanted` rows below them; return their members.

    among: indices of the nodes to choose from, int64 `[n_kv_heads, k]`, -1 for none; None: all.
    Returns int64 `[n_kv_heads, m]`, -1 for none.
    """
    centre, variance, rows, starts, sizes = nodes.tensors()[:5]
    if among is not None:
        index = among.clamp_min(0)
        centre, variance = (_take(part, index) for part in (centre, variance))
        rows, starts, sizes = (part.gather(1, index) for part in (rows, starts, sizes))
        rows = rows.masked_fill(among < 0, 0)
    scores = score(queries, centre, variance).masked_fill((rows == 0)[:, None], -torch.inf)
    best = interleave(scores, rows, wanted)
    return _members(nodes.members, starts, sizes, best & (rows > 0))


def score(queries: Tensor, centre: Tensor, variance: Tensor) -> Tensor:
    """Rank of nodes for each query, float32 `[n_kv_heads, q, m]`; larger is better."""
    mean = queries @ centre.float().transpose(1, 2)
    if not variance.shape[-1]:
        return mean
    spread = queries.square() @ variance.float().transpose(1, 2)
    return mean.add_(spread.sqrt_(), alpha=_DEVIATIONS)


def interleave(scores: Tensor, rows: Tensor, wanted: int) -> Tensor:
    """Choose the nodes that come first when the queries take their best ones in turns.

    scores: `[n_kv_heads, q, m]`; rows: int `[n_kv_heads, m]`. As many turns are taken as fit into
    `wanted` rows, at least one of each query. Returns bool `[n_kv_heads, m]`.
    """
    heads, queries, m = scores.shape
    mean = max(1.0, float(rows.sum()) / rows.numel())
    depth = min(m, max(1, int(_RANKED * wanted / mean)))
    ranked = scores.topk(depth, dim=-1).indices
    turns = depth * queries
    turn = torch.arange(turns, device=scores.device).view(depth, queries).T.expand(ranked.shape)
    first = torch.full((heads, m), turns, device=scores.device)
    first = first.scatter_reduce_(1, ranked.flatten(1), turn.flatten(1), "amin")
    taken = rows.new_zeros(heads, turns + 1, dtype=torch.int64)
    taken = taken.scatter_add_(1, first, rows.long())[:, :-1].cumsum(1)
    fitting = (taken <= wanted).sum(1, keepdim=True).clamp_min(queries)
    return first < fitting


def _members(members: Tensor, starts: Tensor, sizes: Tensor, chosen: Tensor) -> Tensor:
    """Members of the chosen nodes, int64 `[n_kv_heads, m]`, -1 behind the end of a shorter head."""
    heads, numbers = chosen.nonzero(as_tuple=True)
    counts = sizes[heads, numbers].long()
    begins = starts[heads, numbers] - (counts.cumsum(0) - counts)
    index = begins.repeat_interleave(counts)
    index += torch.arange(len(index), device=index.device)
    per_head = counts.new_zeros(len(chosen)).index_add_(0, heads, counts).tolist()
    found = [
        members[head].index_select(0, part).long()
        for head, part in enumerate(torch.split(index, per_head))
    ]
    return pad_sequence(found, batch_first=True, padding_value=-1)


def _take(part: Tensor, index: Tensor) -> Tensor:
    """Rows `index`, int64 `[n_kv_heads, k]`, of `[n_kv_heads, m, d]`."""
    return torch.stack([part[head].index_select(0, chosen) for head, chosen in enumerate(index)])
